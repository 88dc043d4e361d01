"""Run the provider's model with quantized weights (paper, appendix F) or in another dtype than the attacker's."""

from dataclasses import replace
from typing import Any, Literal

from hiddenlab.channels import Stage
from hiddenlab.types import ObservationInfo


class Int8(Stage):
    """Compute the states with weights quantized to 8 bits (bitsandbytes LLM.int8)."""

    spec = "int8"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "quantization": "int8"}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, quantization="int8")

    def __repr__(self) -> str:
        return "int8: the attacker sees the states of the 8-bit model and knows the full-precision weights"


class Nf4(Stage):
    """Compute the states with weights quantized to 4 bits (bitsandbytes NF4)."""

    spec = "nf4"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "quantization": "nf4"}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, quantization="nf4")

    def __repr__(self) -> str:
        return "nf4: the attacker sees the states of the 4-bit model and knows the full-precision weights"


class ProviderDtype(Stage):
    """Compute and release the states in another dtype than the attacker's.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``.
    """

    def __init__(self, dtype: Literal["float32", "bfloat16", "float16"]) -> None:
        self.dtype = dtype
        self.spec = f"dtype:{dtype}"

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "dtype": self.dtype}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, provider_dtype=self.dtype)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states that the provider computed in {self.dtype}, in order"
        )
