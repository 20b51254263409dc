"""What a classic pipeline class does, read off the source of its ``__call__`` before any weight is loaded.

Replaying needs three facts that no declaration carries: which components the step loop calls, where the latents are
decoded, and whether images are encoded. The same reading says why a class cannot be split.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.errors import ModelError
from triptych.pipeline.families import family_of
from triptych.pipeline.names import CONTROL, MASK
from triptych.pipeline.pictures import REFERENCES

FIELDS = ("frames", "images", "videos", "image", "video")
"""What pipelines call their result."""

_AFTER_DECODE = frozenset({"safety_checker", "watermarker"})
"""Models that look at the decoded pixels."""

_UNSENDABLE = frozenset(
    {"control_mask", "controls", "video", "conditioning_frames", "reference_images", "input_images",
     "original_image", "adapter_image", "control_video", "pose_video", "images", "hint", "conditions",
     "reference_conditions"}
)  # fmt: skip
"""Conditioning that requests have no parameter for. Pipelines give most of it a default of None and check later."""

_GIVEN = frozenset({"prompt", "image", MASK, CONTROL})
"""Conditioning that a class may not be able to do without."""

_IMAGE_CLASS = re.compile(
    r"Img2Img|ImageTo|Image2|Edit|Upscale|SuperResolution|Refiner|Pix2Pix|Variation|ControlNet|Adapter|I2V|I2I"
)
_PASSIVE = frozenset({"config", "dtype", "device", "to", "cache_context", "parameters"})
"""Attributes of a component that compute nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """How the ``__call__`` of one pipeline class is laid out."""

    pipeline: str
    """Name of the class."""
    denoisers: frozenset[str]
    """Components that the step loop calls."""
    decode: str
    """The call that turns latents into pixels: ``decode_latents`` or ``<component>.decode``."""
    encodes: bool
    """Whether images are encoded into latents before the loop."""
    inspectors: frozenset[str]
    """Models that look at the decoded pixels."""
    takes_image: bool
    takes_mask: bool
    takes_control: bool
    """Whether a picture steers it that is no start."""
    carried: dict[str, bool]
    """Clips and lists of pictures that requests carry, and whether the call needs them."""
    keeps_keys: bool
    """Whether steps attend to keys and values that an earlier one has kept."""
    output: str
    """``video`` or ``image``."""
    parameters: dict[str, Any]
    """Parameters of ``__call__`` with their defaults; `inspect.Parameter.empty` for none."""

    @property
    def task(self) -> str:
        """The field's word for what it does, e.g. ``text-to-video``."""
        start = "video" if any(self.carried.values()) else "image" if self.takes_image or self.takes_control else "text"
        return "inpainting" if self.takes_mask and self.output == "image" else f"{start}-to-{self.output}"

    @property
    def decoder(self) -> str | None:
        """The component that decodes; None when the pipeline's own method says which."""
        component, _, method = self.decode.rpartition(".")
        return component if method == "decode" else None


def anatomy_of(kind: type[Any]) -> Anatomy:
    """The anatomy of a classic pipeline class; raises `ModelError` with the reason when it cannot be split."""
    name = kind.__name__
    reading = _Reading(kind)
    if reason := reading.refusal():
        raise ModelError(f"{name} cannot be split: {reason}")
    return Anatomy(
        pipeline=name,
        denoisers=frozenset(reading.denoisers),
        decode=reading.decodes[0],
        encodes=reading.encodes,
        inspectors=frozenset(reading.components & _AFTER_DECODE),
        takes_image=reading.takes_image,
        takes_mask=reading.takes_mask,
        takes_control=CONTROL in reading.parameters,
        carried=reading.carried,
        keeps_keys=reading.keeps_keys,
        output=reading.output or "image",
        parameters=reading.parameters,
    )


class _Reading:
    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.call = _parsed(kind, "__call__")
        self.components = {
            name
            for name, parameter in inspect.signature(kind.__init__).parameters.items()
            if name != "self" and (parameter.default is None or parameter.default is inspect.Parameter.empty)
        }
        ignored = frozenset(_ignored(kind, self.call))
        self.parameters = {
            name: parameter.default
            for name, parameter in inspect.signature(kind.__call__).parameters.items()
            if name not in ("self", "kwargs", "args", *_overruled(self.call))
            if parameter.default is inspect.Parameter.empty or name not in ignored
        }
        self.loops = _step_loops(self.call) if self.call is not None else []
        self.autoencoders = {name for name in self.components if _is_autoencoder(name)}
        self.denoisers = {
            name
            for loop in self.loops
            for name in _used(loop, self.components - self.autoencoders)
            if "scheduler" not in name
        }
        self.decodes = sorted(set(self._decode_calls()))

    @property
    def keeps_keys(self) -> bool:
        """Whether its steps give the denoiser what an earlier one has kept of its attention."""
        named = (
            key for loop in self.loops for node in ast.walk(loop) if isinstance(node, ast.Call) for key in node.keywords
        )
        return any(key.arg == "kv_cache" for key in named)

    @property
    def encodes(self) -> bool:
        """Whether anything that the call reaches encodes with an autoencoder."""
        return any(method == "encode" and name in self.autoencoders for name, method in self._reached_calls())

    @property
    def takes_image(self) -> bool:
        """Whether the pipeline cannot do without a picture, though its signature may say None."""
        if "image" not in self.parameters:
            return False
        required = self.parameters["image"] is inspect.Parameter.empty
        named = bool(_IMAGE_CLASS.search(self.kind.__name__))
        return required or named or self.takes_mask or "strength" in self.parameters

    @property
    def takes_mask(self) -> bool:
        """Whether it makes a part of the picture anew."""
        return MASK in self.parameters

    @property
    def carried(self) -> dict[str, bool]:
        """See `Anatomy.carried`."""
        pictures = family_of(self.kind.__name__).pictures
        found = {**({REFERENCES: False} if pictures.references else {}), **pictures.clips}
        return {name: needed for name, needed in found.items() if name in self.parameters}

    @property
    def output(self) -> str | None:
        """``video`` or ``image``, from the fields of what is returned."""
        fields = _returned(self.call) if self.call is not None else set[str]()
        if fields & {"frames", "videos", "video"}:
            return "video"
        return "image" if fields & {"images", "image"} else None

    def refusal(self) -> str | None:
        """Why the class cannot be split; None when it can."""
        if self.call is None or not self.loops:
            return "its __call__ has no loop of its own that steps a scheduler of the pipeline"
        return self._loop_refusal() or self._decode_refusal() or self._input_refusal()

    def _loop_refusal(self) -> str | None:
        if not self.denoisers:
            return "its step loop calls no component of the pipeline"
        for loop in self.loops:
            for name, method in _calls(loop):
                if name in self.autoencoders and method in ("encode", "decode", "__call__"):
                    return f"its step loop calls {name}.{method}, so denoiser and decoder are not apart"
                if name == "self" and method.startswith("decode_latents"):
                    return f"its step loop calls {method}, so denoiser and decoder are not apart"
        if len(self.loops) > 1:
            return f"it has {len(self.loops)} step loops"
        assert self.call is not None
        source = ast.unparse(self.call)
        if "check_text_safety" in source:
            return "its guardrail judges prompts and pixels, in one component"
        if "attn_processor" in source:
            return "it changes its denoiser's attention processors during a request, which other requests share"
        return None

    def _decode_refusal(self) -> str | None:
        if not self.decodes:
            return "it decodes no latents"
        if len(self.decodes) > 1:
            return f"it decodes in several ways: {', '.join(self.decodes)}"
        if self.output is None:
            return f"it makes {', '.join(sorted(_returned(self.call))) or 'nothing'}, neither images nor video"
        assert self.call is not None
        for loop in ast.walk(self.call):
            if isinstance(loop, (ast.For, ast.While)) and self.decodes[0] in _decode_names(loop):
                return f"it calls {self.decodes[0]} in a loop"
        return None

    def _input_refusal(self) -> str | None:
        for name, default in self.parameters.items():
            if name in self.carried:
                continue
            if name == "control_mode" and "Union" in self.kind.__name__:
                return "it works on control_mode, which requests cannot carry"
            if name in _UNSENDABLE or (default is inspect.Parameter.empty and name not in _GIVEN):
                return f"it works on {name}, which requests cannot carry"
        if not _GIVEN & self.parameters.keys():
            return "it takes neither a prompt nor an image"
        return None

    def _decode_calls(self) -> Iterator[str]:
        if self.call is not None:
            yield from _decode_names(self.call)

    def _reached_calls(self) -> Iterator[tuple[str, str]]:
        """Calls on components in ``__call__`` and in the methods that it reaches."""
        waiting, seen = ["__call__"], {"__call__"}
        while waiting:
            body = _parsed(self.kind, waiting.pop())
            for name, method in _calls(body) if body is not None else ():
                if name != "self":
                    yield name, method
                elif method not in seen:
                    seen.add(method)
                    waiting.append(method)


def _parsed(kind: type[Any], method: str) -> ast.FunctionDef | None:
    """The syntax tree of a method; None when Diffusers' base class supplies it, or there is none."""
    owner = next((base for base in kind.__mro__ if method in vars(base)), None)
    function = inspect.unwrap(vars(owner)[method]) if owner is not None else None
    if not inspect.isfunction(function):
        return None
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree if isinstance(tree, ast.FunctionDef) else None


def _overruled(call: ast.FunctionDef | None) -> Iterator[str]:
    """Parameters that a call sets to a constant of its own, whatever it was given."""
    for statement in call.body if call is not None else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _ignored(kind: type[Any], call: ast.FunctionDef | None) -> Iterator[str]:
    """Parameters that a call has and never looks at, by name or through ``locals()`` for its callback."""
    if call is None:
        return
    seen = {node.id for statement in call.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    seen.update(getattr(kind, "_callback_tensor_inputs", ()))
    yield from (argument.arg for argument in (*call.args.args, *call.args.kwonlyargs) if argument.arg not in seen)


def _step_loops(call: ast.FunctionDef) -> list[ast.For | ast.While]:
    """Outermost loops in which a scheduler steps."""
    found: list[ast.For | ast.While] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.For, ast.While)) and any(
            "scheduler" in name and method == "step" for name, method in _calls(node)
        ):
            found.append(node)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(call)
    return found


def _calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(component, method) of ``self.component.method(...)``; ``__call__`` for ``self.component(...)`` of a component,
    ("self", method) for anything called on the pipeline itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = node.func.value, node.func.attr
        if isinstance(owner, ast.Name):
            yield ("self", method) if owner.id == "self" else (owner.id, method)
            if owner.id == "self":
                yield method, "__call__"
        elif isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "self":
            yield owner.attr, method


def _used(tree: ast.AST, components: set[str]) -> Iterator[str]:
    """Components that ``tree`` refers to otherwise than to ask a fact."""
    facts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _PASSIVE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in components and id(node) not in facts:
            yield node.attr


def _decode_names(tree: ast.AST) -> Iterator[str]:
    for name, method in _calls(tree):
        if method == "decode" and _is_autoencoder(name):
            yield f"{name}.decode"
        elif name == "self" and method.startswith("decode_latents"):
            yield method


def _is_autoencoder(name: str) -> bool:
    return "vae" in name or name in ("movq", "vqgan")


def _returned(call: ast.AST | None) -> set[str]:
    """Fields of the output object that a call returns."""
    found: set[str] = set()
    for node in ast.walk(call or ast.Pass()):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            found.update(keyword.arg for keyword in node.value.keywords if keyword.arg)
            if node.value.args and ast.unparse(node.value.func) == "ImagePipelineOutput":
                found.add("images")
    return found
