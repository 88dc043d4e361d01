from . import attacks as attacks
from . import defenses as defenses
from .api import assess as assess
from .api import attack as attack
from .api import channel as channel
from .base import Attack as Attack
from .channels import Channel as Channel
from .config import AttackConfig as AttackConfig
from .diagnosis import diagnose as diagnose
from .models import TruncatedModel as TruncatedModel
from .models import load_model as load_model
from .observation import load_observations as load_observations
from .observation import save_observations as save_observations
from .runner import Run as Run
from .runner import run as run
from .runner import run_layers as run_layers
from .scoring import Score as Score
from .scoring import score as score
from .stages import Stage as Stage
from .types import AttackResult as AttackResult
from .types import GroundTruth as GroundTruth
from .types import Observation as Observation
from .types import Site as Site

__version__: str
