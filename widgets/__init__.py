"""Views for notebooks; the folder stands at the top level and imports as `seedkit.widgets`."""

from .explorer import GateExplorer, SkillEditor
from .inspector import SkillInspector
from .signals import CLASSES, ViewError, token_classes

__all__ = ["CLASSES", "GateExplorer", "SkillEditor", "SkillInspector", "ViewError", "token_classes"]
