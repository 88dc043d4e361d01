"""Assess a defense: attack what it releases with everything the lab has, and say in one sentence whether it holds."""
