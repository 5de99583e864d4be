"""Which tensors are scattered into live weights, and which are loaded with their modules."""

from dataclasses import dataclass, field

__all__ = ["Classes"]


@dataclass(frozen=True, slots=True)
class Classes:
    """`loaded`: why each tensor that is not scattered is loaded. `modules`: those that each tensor feeds."""

    loaded: dict[str, str] = field(default_factory=dict)
    modules: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, reasons: dict[str, str], modules: dict[str, frozenset[str]]) -> "Classes":
        """A tensor that shares a module with a loaded tensor is loaded too, because a module is filled whole.

        `reasons`: why some tensors must be loaded.
        """
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
        """The tensors to load when `touched` change: every tensor that feeds a module which one of them feeds."""
        names = {name for name in touched if name in self.loaded}
        while True:
            filled = {module for name in names for module in self.modules[name]}
            more = {name for name in self.loaded if self.modules[name] & filled}
            if more <= names:
                return tuple(sorted(names))
            names |= more
