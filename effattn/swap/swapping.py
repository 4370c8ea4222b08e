"""Swapping: which sites of a model are served by which backend, the report on it, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..backend import Backend, Request, UnsupportedError, get
from . import multihead, sdpa
from .sites import ATTRIBUTE, EFFATTN, MULTIHEAD, OWN, SDPA, TRANSFORMERS, Site, attention_dropout, find_sites

__all__ = ["Swap", "swap"]

Selector = int | str
_MISSING = object()


def swap(
    model: nn.Module,
    backend: str | Backend | Mapping[Selector, str | Backend],
    *,
    layers: Selector | Iterable[Selector] | None = None,
    strict: bool = True,
) -> Swap:
    """Serve the attention of ``model`` by ``backend``, from now on or within a ``with`` block.

    Covered are Hugging Face models through the ``AttentionInterface`` of transformers, ``nn.MultiheadAttention`` and
    the encoder and decoder layers around it, calls of ``F.scaled_dot_product_attention`` by whatever name, and this
    project's own layers. Weights are untouched.

    Args:
        model: any module; it is changed in place.
        backend: a spec string or a ``Backend`` for all layers, or a mapping from layers to them, where a later entry
            wins over an earlier one.
        layers: which layers; None means all. A number is the first one in a site's path (3 for
            ``encoder.layer.3.attention.self``), a string a pattern of the path or of a parent's (``"decoder"``,
            ``"*.self_attn"``).
        strict: refuse the whole swap if one site cannot be served. If False, such a site runs as it did, and the
            report says why.

    Returns:
        A ``Swap``: the report on every site, how often each was asked, and ``undo()``. As a context manager it undoes
        itself at the end, after an exception too; swaps nest.

    Raises:
        ValueError: the model has no attention that can be found, ``layers`` names none of it, or (``strict``) one of
            them does an attention of its own.
        UnsupportedError: the backend cannot do what a layer needs: causal, a cache, dropout in training, a device.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"swap: model must be an nn.Module, got {type(model).__name__}")
    found = find_sites(model)
    if not found:
        raise ValueError(
            f"swap: {type(model).__name__} has no attention that effattn can find: no module that goes through the "
            "AttentionInterface of transformers, no nn.MultiheadAttention, no call of F.scaled_dot_product_attention"
        )
    chosen = _choose({path: site for path, (site, _) in found.items()}, backend, layers)
    refused: dict[str, ValueError] = {}
    for path, wanted in chosen.items():
        site, module = found[path]
        error = _refusal(site, module, wanted)
        if error is None:
            site.backend = wanted
        else:
            refused[path] = error
            site.note = " ".join(str(error).split())
    if refused and strict:
        raise _joined(refused, found)
    for path, (site, _) in found.items():
        if path not in chosen:
            site.note = "not selected: as it was"
    return Swap(model, found)


class Swap:
    """A swap in place: prints as a table of its sites.

    ``sites`` are all places where the model attends, in order; see ``Site``. ``undo()`` brings the model back to
    what it was, which leaving the ``with`` block does too.
    """

    def __init__(self, model: nn.Module, found: Mapping[str, tuple[Site, nn.Module]]) -> None:
        self.model_name = type(model).__name__
        self.sites = tuple(site for site, _ in found.values())
        self._changes: list[_Change] = []
        try:
            for site, module in found.values():
                if site.backend is not None:
                    self._serve(model, site, module)
            self._leave_the_rest(model, found)
        except BaseException:
            self.undo()
            raise

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __getitem__(self, path: str) -> Site:
        """The site at ``path``."""
        for site in self.sites:
            if site.path == path:
                return site
        raise KeyError(f"swap: {path!r} is no site of {self.model_name}; they are {_listed(self.sites)}")

    def undo(self) -> None:
        """Bring the model back to what it was before this swap. A second time it does nothing.

        Raises ``ValueError``, and changes nothing, while a later swap of the same layers is in place.
        """
        if any(not change.stands for change in self._changes):
            raise ValueError(f"swap: a later swap of {self.model_name} is still in place; undo that one first")
        while self._changes:
            self._changes.pop().undo()

    def __str__(self) -> str:
        served = sum(site.backend is not None for site in self.sites)
        table = [("site", "kind", "backend", "calls", "note" if any(site.note for site in self.sites) else "")]
        for site in self.sites:
            backend = str(site.backend) if site.backend else "-"
            table.append((site.path or "(the model)", site.kind, backend, str(site.calls), site.note))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
        return f"{self.model_name}: {served} of {len(self.sites)} attention sites served\n" + "\n".join(lines)

    __repr__ = __str__

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append(_Change(owner, name, value))

    def _serve(self, model: nn.Module, site: Site, module: nn.Module) -> None:
        self._set(module, ATTRIBUTE, site)
        if site.kind == TRANSFORMERS:
            from . import hugging_face

            hugging_face.register()
            for config in hugging_face.configurations(model, site.path):
                if config._attn_implementation != hugging_face.NAME:
                    self._set(config, "_attn_implementation_internal", hugging_face.NAME)
        elif site.kind == MULTIHEAD:
            self._replace_forward(module, multihead.forward)
            self._close_fast_paths(model, module)
        elif site.kind == SDPA:
            self._replace_forward(module, sdpa.forward)
        elif site.kind == EFFATTN:
            self._set(module, "backend", site.backend)
            self._replace_forward(module, _counted)

    def _replace_forward(self, module: nn.Module, function: Any) -> None:
        current = vars(module).get("forward")
        if isinstance(current, partial) and current.func is function:
            return  # an outer swap put it there; it asks the module for its site, which is ours now
        self._set(module, "_effattn_forward", module.forward)
        # A partial, because copies and pickles of one are bound to the copy of the module.
        self._set(module, "forward", partial(function, module))

    def _close_fast_paths(self, model: nn.Module, module: nn.Module) -> None:
        """Keep PyTorch's encoders from computing whole layers in one kernel, which would pass the module by."""
        for parent in model.modules():
            if module in parent.modules():
                if isinstance(parent, nn.TransformerEncoderLayer):
                    self._set(parent, "activation_relu_or_gelu", 0)
                elif isinstance(parent, nn.TransformerEncoder):
                    self._set(parent, "use_nested_tensor", False)

    def _leave_the_rest(self, model: nn.Module, found: Mapping[str, tuple[Site, nn.Module]]) -> None:
        """Layers that are not served, but whose configuration now names effattn, go on as they were."""
        for site, module in found.values():
            if site.kind != TRANSFORMERS or site.backend is not None or hasattr(module, ATTRIBUTE):
                continue
            from . import hugging_face

            config = getattr(module, "config", None)
            for change in self._changes:
                if change.owner is config and change.name == "_attn_implementation_internal":
                    site._implementation = change.before or "eager"
                    hugging_face.original(module, site._implementation)
                    self._set(module, ATTRIBUTE, site)


class _Change:
    """One attribute set on a module or a configuration, and how it was."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.before = self._current()
        setattr(owner, name, value)

    def _current(self) -> Any:
        if isinstance(getattr(type(self.owner), self.name, None), property):
            return getattr(self.owner, self.name)
        return vars(self.owner).get(self.name, _MISSING)

    @property
    def stands(self) -> bool:
        return self._current() is self.value

    def undo(self) -> None:
        if self.before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def _counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    getattr(module, ATTRIBUTE).count()
    return module._effattn_forward(*args, **kwargs)  # type: ignore[operator]


# Choosing and refusing --------------------------------------------------------------------------------------


def _choose(
    sites: Mapping[str, Site],
    backend: str | Backend | Mapping[Selector, str | Backend],
    layers: Selector | Iterable[Selector] | None,
) -> dict[str, Backend]:
    """The backend of every selected site, by path."""
    if isinstance(backend, Mapping):
        if layers is not None:
            raise ValueError("swap: backend names the layers already, as a mapping; layers must be None")
        if not backend:
            raise ValueError("swap: backend must name at least one layer, got an empty mapping")
        wanted = [(selector, get(spec)) for selector, spec in backend.items()]
    elif layers is None:
        return dict.fromkeys(sites, get(backend))
    else:
        selectors = [layers] if isinstance(layers, int | str) else list(layers)
        if not selectors:
            raise ValueError("swap: layers must name at least one layer, got none")
        wanted = [(selector, get(backend)) for selector in selectors]
    chosen: dict[str, Backend] = {}
    for selector, one in wanted:
        if not isinstance(selector, int | str) or isinstance(selector, bool):
            raise ValueError(f"swap: layers must be numbers or patterns of paths, got {selector!r}")
        matched = [path for path, site in sites.items() if site.matches(selector)]
        if not matched:
            numbers = sorted({site.layer for site in sites.values() if site.layer is not None})
            known = f"numbers {numbers[0]} to {numbers[-1]}, paths " if numbers else ""
            raise ValueError(f"swap: layers names {selector!r}, which no site has; {known}{_listed(sites.values())}")
        chosen |= dict.fromkeys(matched, one)
    return {path: chosen[path] for path in sites if path in chosen}


def _refusal(site: Site, module: nn.Module, backend: Backend) -> ValueError | None:
    """Why ``backend`` cannot serve the site, as the error to raise."""
    if site.kind == OWN:
        return ValueError(
            f"{type(module).__name__} computes an attention of its own, which cannot be swapped from outside"
        )
    reasons: list[str] = []
    needs: list[dict[str, Any]] = [{}]
    if site.kind == TRANSFORMERS:
        from . import hugging_face

        reasons, needs = hugging_face.refusals(module), hugging_face.needs(module)
    elif site.kind in (MULTIHEAD, EFFATTN):
        reasons, needs = multihead.refusals(module), multihead.needs(module)
    elif getattr(module, "fused_attn", True) is False:  # timm's switch
        reasons = ["its fused_attn is off, so it does not call F.scaled_dot_product_attention"]
    else:
        needs = [{"dropout_p": attention_dropout(module)}]
    if reasons:
        return ValueError(f"{type(module).__name__} cannot be served: " + "; ".join(reasons))
    for need in needs:
        unable = backend.reasons(_request(module, need))
        reasons += [reason for reason in unable if reason not in reasons]
    return UnsupportedError(backend, reasons) if reasons else None


def _request(module: nn.Module, need: Mapping[str, Any]) -> Request:
    """A call as this module will make it, at a length that stands for all."""
    parameters = [p for p in module.parameters() if p.device.type != "meta"]
    floating = [p for p in parameters if p.is_floating_point()]  # quantised weights are not
    fields: dict[str, Any] = {
        "batch_size": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "query_len": 16,
        "key_len": 16,
        "head_dim": 16,
        "value_dim": 16,
        "device": parameters[0].device.type if parameters else "cpu",
        "dtype": floating[0].dtype if floating else torch.float32,
        "backward": module.training and any(p.requires_grad for p in parameters),
        **need,
    }
    return Request(**fields, query_offset=fields["key_len"] - fields["query_len"])


def _joined(refused: Mapping[str, ValueError], found: Mapping[str, tuple[Site, nn.Module]]) -> ValueError:
    """One error for all sites that cannot be served: those with the same reason together."""
    groups: dict[str, list[Site]] = {}
    for path, error in refused.items():
        reason = f"{error.backend}: {'; '.join(error.reasons)}" if isinstance(error, UnsupportedError) else str(error)
        groups.setdefault(reason, []).append(found[path][0])
    reasons = [f"{_listed(sites)}: {reason}" for reason, sites in groups.items()]
    unsupported = [error for error in refused.values() if isinstance(error, UnsupportedError)]
    if len(unsupported) == len(refused):
        return UnsupportedError(", ".join(dict.fromkeys(error.backend for error in unsupported)), reasons)
    message = f"swap: {len(refused)} of {len(found)} attention sites cannot be served (strict=False leaves them):"
    return ValueError("\n  - ".join([message, *reasons]))


def _listed(sites: Iterable[Site]) -> str:
    paths = [site.path or "(the model)" for site in sites]
    return ", ".join(paths if len(paths) <= 4 else [*paths[:2], "...", paths[-1]])
