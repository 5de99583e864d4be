"""Which of a model's tensors are scattered into live weights, and which are loaded with their modules."""

from dataclasses import dataclass, field

__all__ = ["Classes"]


@dataclass(frozen=True, slots=True)
class Classes:
    """Why each tensor that is not scattered is not, and which modules each tensor feeds."""

    loaded: dict[str, str] = field(default_factory=dict)
    modules: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, reasons: dict[str, str], modules: dict[str, frozenset[str]]) -> "Classes":
        """Tensors that share a module with one that is loaded are loaded with it: a module is filled whole."""
        loaded = dict(reasons)
        while True:
            filled = {module for name in loaded for module in modules[name]}
            more = {
                name: "its module is loaded as a whole"
                for name in modules
                if modules[name] & filled and name not in loaded
            }
            if not more:
                return cls(loaded, modules)
            loaded |= more

    def to_load(self, touched: set[str]) -> tuple[str, ...]:
        """What must be loaded when these tensors change: all that feeds a module that one of them feeds."""
        names = {name for name in touched if name in self.loaded}
        while True:
            filled = {module for name in names for module in self.modules[name]}
            more = {name for name in self.loaded if self.modules[name] & filled}
            if more <= names:
                return tuple(sorted(names))
            names |= more
