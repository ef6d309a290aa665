"""The key/value cache: what attention remembers of earlier positions."""

import torch


class LayerCache:
    """Keys and values of one layer, unpacked by `k, v = cache`, each [batch, seq, kv_heads, head_dim].

    A cache never changes: `append` returns a new one, and two continuations may branch from one past. Without gradients
    the new positions are written behind the old ones in shared storage, so nothing of the past is copied, except
    when the storage is full (it doubles) or another continuation has already written there.
    """

    def __init__(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None, capacity: int = 0):
        """capacity: room, in positions, to reserve at the first append."""
        self._storage, self._capacity = None, capacity
        self.length = 0
        if k is not None:
            self._storage, self.length = _Storage(k, v, used=k.shape[1]), k.shape[1]

    def __iter__(self):
        return iter((self[0], self[1]))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in (0, 1, -1, -2):
            raise IndexError(f"a layer's cache holds k (0) and v (1), not {index}")
        if self._storage is None:
            raise ValueError("this cache is still empty: it has no k and v yet")
        stored = (self._storage.k, self._storage.v)[index]
        return stored[:, : self.length]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> "LayerCache":
        """This past followed by k and v, each [batch, new positions, kv_heads, head_dim].

        Raises ValueError if they differ from the past in type, batch, kv_heads or head_dim.
        """
        if self._storage is None and (torch.is_grad_enabled() or not self._capacity):
            return LayerCache(k, v)
        if self._storage is not None:
            past = self._storage.k[:, : self.length]
            if past.dtype != k.dtype:
                raise ValueError(f"the cache holds {past.dtype}, the new keys are {k.dtype}; use one type for both")
            if past.shape[0] != k.shape[0] or past.shape[2:] != k.shape[2:]:
                raise ValueError(
                    f"the cache holds keys of shape {list(past.shape)} (batch, seq, kv_heads, head_dim), "
                    f"the new ones are {list(k.shape)}; batch, kv_heads and head_dim must be equal"
                )
        if torch.is_grad_enabled():  # autograd needs the past unchanged: copy
            return LayerCache(torch.cat([self[0], k], dim=1), torch.cat([self[1], v], dim=1))
        end = self.length + k.shape[1]
        storage = self._storage
        if storage is None or not storage.can_take(self.length, end):
            storage = _Storage.with_room(self, k, v, room=max(2 * end, self._capacity))
        storage.k[:, self.length : end], storage.v[:, self.length : end] = k, v
        storage.used = end
        longer = LayerCache()
        longer._storage, longer.length = storage, end
        return longer


class _Storage:
    """Tensors with room for more positions; positions from `used` on are free."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, used: int):
        self.k, self.v, self.used = k, v, used

    def can_take(self, start: int, end: int) -> bool:
        frozen = self.k.requires_grad or (self.k.is_inference() and not torch.is_inference_mode_enabled())
        return self.used == start and end <= self.k.shape[1] and not frozen

    @classmethod
    def with_room(cls, past: LayerCache, k: torch.Tensor, v: torch.Tensor, room: int) -> "_Storage":
        batch, _, kv_heads, head_dim = k.shape
        empty = [new.new_empty(batch, kv_heads, room, head_dim).transpose(1, 2) for new in (k, v)]
        if past.length:
            for target, old in zip(empty, past, strict=True):
                target[:, : past.length] = old
        return cls(*empty, used=past.length)


def new_cache(num_layers: int, capacity: int) -> tuple[LayerCache, ...]:
    """An empty past for every layer, with room for `capacity` positions."""
    return tuple(LayerCache(capacity=capacity) for _ in range(num_layers))
