"""Who gets a GPU's lock next: by priority (higher first), then first come. One `Line` per GPU. Pure."""

from dataclasses import dataclass, field


@dataclass
class Line:
    """Services that want the lock of one GPU, and what the keeper last said of its holder."""

    holder: str | None = None
    """As the keeper names it: a service or job; None: free."""
    _last_held: dict[str, float] = field(default_factory=dict)
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    _arrivals: int = 0

    def join(self, name: str, priority: int) -> None:
        """Stand in line; one who stands there already keeps the place."""
        if name not in self._places:
            self._arrivals += 1
            self._places[name] = (-priority, self._arrivals)

    def leave(self, name: str) -> None:
        self._places.pop(name, None)

    def first(self) -> str | None:
        """Whose turn it is."""
        return min(self._places, key=self._places.__getitem__, default=None)

    def taken(self, holder: str) -> None:
        self.holder = holder

    def free(self, now: float) -> None:
        if self.holder is not None:
            self._last_held[self.holder] = now
        self.holder = None

    def held_by(self, name: str, since: float) -> bool:
        """Whether `name` holds it, or held it at any moment from `since` on."""
        return self.holder == name or self._last_held.get(name, float("-inf")) >= since

    def other_holder(self, name: str, since: float) -> str | None:
        """Who else holds it, or held it at any moment from `since` on; None: nobody that the keeper knows of."""
        if self.holder is not None:
            return None if self.holder == name else self.holder
        others = {who: at for who, at in self._last_held.items() if who != name and at >= since}
        return max(others, key=others.__getitem__, default=None)
