from typing import Any

from jackfield.algorithm import Algorithm as Algorithm
from jackfield.algorithm import AlgorithmConfig as AlgorithmConfig
from jackfield.algorithm import LossOutput as LossOutput
from jackfield.algorithm import Needs as Needs
from jackfield.batch import Batch as Batch
from jackfield.components import Backend as Backend
from jackfield.components import Component as Component
from jackfield.components import ComponentConfig as ComponentConfig
from jackfield.components import Dataset as Dataset
from jackfield.components import Engine as Engine
from jackfield.components import Launcher as Launcher
from jackfield.components import Outputs as Outputs
from jackfield.components import Reward as Reward
from jackfield.components import Rollout as Rollout
from jackfield.components import Tracker as Tracker
from jackfield.components import Transport as Transport
from jackfield.config import load_config as load_config
from jackfield.hookspecs import hookimpl as hookimpl
from jackfield.trainer import Trainer as Trainer

__version__: str
JACKFIELD_API: int
OLDEST_API: int

def __getattr__(name: str) -> Any: ...  # what plugins add by entry points of group jackfield.export
