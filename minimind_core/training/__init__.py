"""Training: the learning rate, the update, checkpoints that resume bit for bit, several processes.

From the command line: python -m minimind_core.training --help
"""

from .schedule import cosine_learning_rate, parameter_groups
from .settings import TrainingSettings
from .trainer import Record, Trainer

__all__ = ["Record", "Trainer", "TrainingSettings", "cosine_learning_rate", "parameter_groups"]
