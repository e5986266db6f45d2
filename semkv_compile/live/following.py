"""A compiled model beside the model that it was made of: it looks for changes, follows them, or captures that model again."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torch import Tensor

from semkv.config import CompileConfig
from semkv.errors import StaleModelError
from semkv.ir.program import Program
from semkv.ir.rewritten import Rewritten
from semkv.live.model import LiveModel, LiveWeights, outdated
from semkv.live.shared_weights import SharedWeights
from semkv.methods import Method
from semkv.profiles.schema import Profile
from semkv.runtime.modes import undisturbed
from semkv.runtime.row_memory import Placement


class Following(SharedWeights, ABC):
    """What every call asks first: whether the model is still the one that was captured."""

    program: Program
    placement: Placement
    method: Method
    settings: CompileConfig
    profile: Profile | None
    fingerprint: str | None
    config: Any
    _live: LiveModel | None

    @abstractmethod
    def _assemble(self, source: Program, profile: Profile | None, fingerprint: str | None) -> None:
        """Lower `source` for this model's method, budget and settings, and run on it from now on."""

    @undisturbed
    def _follow(self, *, sample: bool = True) -> None:
        """Run on the weights that the model has now; `StaleModelError` where that takes another capture. See `LiveModel.look`."""
        live = self._live
        if live is None or live.look(sample=sample) is self.placement.weights:
            return
        with live.lock:
            made = self.placement.weights
            if made is live.weights:  # another thread has followed
                return
            assert isinstance(made, LiveWeights)
            source, fingerprint = live.followed(self._source, made, self.settings)
            copied = live.copied(self.program, source, made)
            if copied:  # what was lowered holds numbers of before
                source = source.evolve(rewritten=Rewritten())
            if source is not self._source or copied:
                self._assemble(source, self.profile, fingerprint)
            else:
                self.placement, self.fingerprint = replace(self.placement, weights=live.weights), fingerprint
            self._warn_of_profile()

    def _follow_for(self, ids: Any) -> None:
        """`_follow`, which for one token per row compares no numbers: that is a step of somebody's loop."""
        self._follow(sample=isinstance(ids, Tensor) and ids.dim() > 1 and ids.shape[1] > 1)

    @undisturbed
    def refresh(self, profile: Profile | None = None) -> None:
        """Capture the model again as it is now, in place: after adapters were merged, switched or added, modules replaced, and what
        else no captured graph can follow. Method, budget and settings stay; states and records made before are refused.

        profile: in the place of this model's, which else stays, with a warning where it is of other weights.

        Raises
        ------
        StaleModelError: the model is gone, or this one was loaded from an artifact. Others: as `semkv.compile`.
        """
        before = self._live
        if before is None:
            raise StaleModelError(
                "this compiled model was not made of a model that lives here (it was loaded, or made of a program): compile the "
                "model with semkv.compile"
            )
        with before.lock:
            live, source, fingerprint = before.again(self.settings)
            kept = self.profile if profile is None else profile
            if profile is not None:
                profile.check_model(fingerprint)
            if kept is not None:
                self.method.check(kept)
                kept.check_stores(source.stores)
            self._live = live
            try:
                self._assemble(source, kept, fingerprint)
            except BaseException:
                self._live = before
                raise
            self.config = copy.deepcopy(getattr(live.model, "config", self.config))
            self._warn_of_profile()

    def _warn_of_profile(self) -> None:
        """Warn where the profile is of weights that the model no longer has."""
        if self.profile is not None and self.profile.fingerprint != self.fingerprint:
            warnings.warn(
                "the profile was calibrated with other weights than the model has now: calibrate again, and pass it to "
                "compiled.refresh(profile=...)",
                stacklevel=4,
            )

    def _check_weights(self, weights: Any, what: str) -> None:
        """Raise `StateError` for what was made with weights that the model had before."""
        if weights is not None and self.placement.weights is not None and weights.precede(self.placement.weights):
            raise outdated(what)


__all__ = ["Following"]
