from .beam_decoding import BeamDecoding as BeamDecoding
from .fingerprint_inversion import FingerprintInversion as FingerprintInversion
from .infill import Infill as Infill
from .missing_tokens import MissingTokenSearch as MissingTokenSearch
from .nearest import NearestEmbedding as NearestEmbedding
from .partial_sums import PartialSums as PartialSums
from .sipit import SipIt as SipIt
from .vocab_match import VocabMatch as VocabMatch
