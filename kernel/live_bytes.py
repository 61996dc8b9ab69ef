"""Counts the memory that tensors hold, storage by storage, as operators make and free them.

The counts do not come from an allocator: nothing is rounded or cached, and workspaces inside an operator are
not seen. So real tensors and tensors without data give the same numbers.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ultrabench.kernel.compat_fake import held, unseen_bookkeeping, watched_resizes
from ultrabench.kernel.counts import Observer


class LiveBytes(Observer):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages that operators inside the `with` block returned."""

    def __init__(self) -> None:
        super().__init__()
        self._now = self.peak = 0
        self._numbers = count()
        self._number: dict[int, int] = {}
        """Id of a live storage -> its number, which is unique; a later storage may get the same id."""
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._at_peak: dict[int, int] = {}
        self._rising = False
        self._dropped: list[tuple[int, int]] = []
        """Storages that were freed, perhaps by another thread, and are not yet subtracted."""
        self._patches = ExitStack()

    def __enter__(self) -> "LiveBytes":
        self._patches.enter_context(unseen_bookkeeping())
        self._patches.enter_context(watched_resizes(self._resized))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts the storages that `func` made."""
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = held(tensor).untyped_storage()
                self._settle()  # its id may have belonged to a freed storage
                if id(storage) not in self._number:
                    self._hold(storage)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, number = id(storage), next(self._numbers)
        self._number[key] = number
        self._refs[number] = weakref.ref(storage, lambda _: self._dropped.append((key, number)))
        self._resize(number, storage.nbytes())

    def _settle(self) -> None:
        """Subtracts freed storages; it runs later than they are freed, which may happen in any operation."""
        while self._dropped:
            key, number = self._dropped.pop(0)
            self._resize(number, 0)
            del self._number[key], self._refs[number], self._sizes[number]

    @property
    def now(self) -> int:
        """The bytes of the storages that are live now."""
        self._settle()
        return self._now

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        if id(storage) in self._number:
            self._resize(self._number[id(storage)], storage.nbytes())

    def _resize(self, number: int, nbytes: int) -> None:
        change = nbytes - self._sizes.get(number, 0)
        if change < 0 and self._rising:
            self._at_peak, self._rising = self._sizes.copy(), False
        self._sizes[number] = nbytes
        self._now += change
        if self._now > self.peak:
            self.peak, self._rising = self._now, True

    def reset_peak(self) -> None:
        """Sets the peak to the storages that are live now."""
        self.peak, self._rising = self.now, True

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Sets the kind of the storages of `tensors` for all their lifetime; the default is activation."""
        self._settle()
        for tensor in tensors:
            number = self._number.get(id(held(tensor).untyped_storage()))
            if number is not None:
                self._kinds[number] = kind

    def peak_by_kind(self) -> Counter[str]:
        """The bytes of each kind at the peak; their sum is the peak."""
        parts = Counter[str]()
        for number, nbytes in (self._sizes if self._rising else self._at_peak).items():
            parts[self._kinds.get(number, "activation")] += nbytes
        return parts
