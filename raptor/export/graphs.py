"""A model as one graph in a file: of torch.export (.pt2), or ONNX. Tied weights stand in it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from raptor.export.weights import quiet
from raptor.files import replacing
from raptor.surrogate.at_speed import at_speed
from raptor.vit.calls import reason_of
from raptor.vit.view import ViT, recording

_LARGEST_BATCH = 4096
_FOLDED = 1024  # values of a constant that ONNX may compute ahead
_CONSTANTS = 1 << 16  # bytes of small constants in a graph of any size


@dataclass
class Exported:
    """A file as another program runs it.

    Attributes:
        run: images (B, 3, H, W) -> the model's output.
        record: images -> the states `a_0..a_L` and the output.
    """

    run: Callable[[Tensor], Tensor]
    record: Callable[[Tensor], tuple[list[Tensor], Tensor]]


class _Whole(nn.Module):
    """A view as a module of images only; with `states` it returns `(output, a_0, ..., a_L)`."""

    def __init__(self, vit: ViT, states: bool):
        super().__init__()
        self.model = vit.model
        self._vit = (vit,)  # in a tuple, so that the final norm is not registered a second time
        self._states = states

    def forward(self, images: Tensor) -> Any:
        vit = self._vit[0]
        if not self._states:
            return vit(images).float()
        with recording(vit) as states:
            output = vit(images)
        return output.float(), *states


def trace(vit: ViT, states: bool = False) -> Any:
    """The graph of torch.export for a batch of any size; ValueError with the reason if torch.export refuses."""
    size = vit.preprocess.size
    # Two images: torch.export would take a batch of one for a constant.
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    batch = torch.export.Dim("batch", min=1, max=_LARGEST_BATCH)
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(_Whole(vit, states), (images,), dynamic_shapes={"images": {0: batch}})
    # What a model's own code makes torch.export raise has no common type.
    except Exception as error:
        raise ValueError(
            f"torch.export refuses {vit.name} ({reason_of(error)[:160]}): take --to timm or --to folder"
        ) from None


def fixed(vit: ViT) -> ViT:
    """The model as it is exported: of a surrogate, with the factors of each depth computed once.

    vit: a copy, which is changed: timm's models get position embeddings of the size of the images, because ONNX lacks
        the interpolation that they would otherwise do for each image.
    """
    size = vit.preprocess.size
    positions = getattr(vit.model, "pos_embed", None)
    resize: Any = getattr(vit.model, "set_input_size", None)
    if isinstance(positions, nn.Parameter) and resize is not None:
        resize(img_size=(size, size))
        vit.model.requires_grad_(False)
    return at_speed(vit) if vit.phases else vit


# torch.export ---------------------------------------------------------------------------------------------------------


def write_pt2(vit: ViT, path: Path) -> None:
    """Write the graph of torch.export."""
    program = trace(vit)
    # The batch it was traced with would be saved too, and is as large as a small model.
    program.example_inputs = None
    for node in program.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(name, None)  # paths of this machine, and more bytes than a small model has
    with replacing(path) as partial, quiet():
        with partial.open("wb") as file:
            torch.export.save(program, file)


def read_pt2(path: Path, vit: ViT) -> Exported:
    """The file at `path`, which was written of `vit`."""
    module = torch.export.load(path).module()
    # The states have the names that they have in a graph that returns them.
    names = trace(vit, states=True).graph_signature.user_outputs[1:]
    found = {node.name for node in module.graph.nodes}
    assert found.issuperset(names), "both graphs were traced alike"

    def record(images: Tensor) -> tuple[list[Tensor], Tensor]:
        # The graph itself is run, node by node: hooks see no blocks in it.
        keeper = _Keeper(module, set(names))
        with torch.no_grad():
            output = keeper.run(images)
        return [keeper.kept[name] for name in names], output

    return Exported(torch.no_grad()(module), record)


class _Keeper(fx.Interpreter):
    """Runs a graph node by node and keeps the values of some nodes."""

    def __init__(self, module: fx.GraphModule, names: set[str]):
        super().__init__(module)
        self.names = names
        self.kept: dict[str, Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.name in self.names:
            self.kept[node.name] = value.float()
        return value


# ONNX -----------------------------------------------------------------------------------------------------------------


def write_onnx(vit: ViT, path: Path, weight_bytes: int) -> list[str]:
    """Write the ONNX graph; the result names its states `a_0..a_L`, which are no outputs of it.

    weight_bytes: what the weights take, each tied one once. A graph whose constants take more is refused, because tied
        weights were then copied.
    """
    import onnx
    from onnxscript.optimizer import optimize

    program = trace(vit, states=True)
    names = ["output"] + [f"a_{layer}" for layer in range(vit.num_layers + 1)]
    try:
        with quiet():
            found = torch.onnx.export(
                program, (), input_names=["images"], output_names=names, verbose=False, optimize=False
            )
            assert found is not None
            # By itself the exporter folds whatever has up to 256 thousand values, and so copies tied weights.
            # A second iteration takes as long as the first and removes one node of 260.
            optimize(found.model, num_iterations=1, input_size_limit=_FOLDED, output_size_limit=_FOLDED)
        model = found.model_proto
    except Exception as error:
        raise ValueError(f"{vit.name} cannot be written as ONNX ({reason_of(error)[:160]}): take --to pt2") from None
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        del part.metadata_props[:]  # paths of this machine, and more bytes than a small model has
    states = [output.name for output in model.graph.output][1:]
    del model.graph.output[1:]
    num_bytes = sum(onnx.numpy_helper.to_array(one).nbytes for one in model.graph.initializer)
    # The factors of each depth, and a few positions.
    others = 4 * 10 * vit.dim * (vit.num_layers + 1) + _CONSTANTS
    if num_bytes > 1.01 * weight_bytes + others:
        raise ValueError(
            f"the ONNX graph of {vit.name} holds {num_bytes / 1e6:.1f} MB of constants where its weights take "
            f"{weight_bytes / 1e6:.1f}: tied weights were copied, so the file is not written; take --to pt2"
        )
    with replacing(path) as partial:
        try:
            onnx.save(model, str(partial))
        except ValueError:  # protobuf's limit
            raise ValueError(
                f"{vit.name} is larger than the 2 GB of an ONNX file: take --weights fp16 or int8"
            ) from None
    return states


def read_onnx(path: Path, states: list[str]) -> Exported:
    """The file at `path` in onnxruntime, with as many threads as torch has."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3

    def open_session(model: Any) -> Any:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    # Two sessions, because states that are outputs keep onnxruntime from merging operations, which costs time.
    plain = open_session(str(path))
    # The very file, except that it also gives out its states.
    model = onnx.load(str(path))
    for name in states:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    recording = open_session(model.SerializeToString())

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(plain.run(None, {"images": images.numpy()})[0])

    def record(images: Tensor) -> tuple[list[Tensor], Tensor]:
        arrays = [torch.from_numpy(array).float() for array in recording.run(None, {"images": images.numpy()})]
        return arrays[1:], arrays[0]

    return Exported(run, record)
