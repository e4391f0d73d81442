"""One dataclass per command: its options at a terminal, its keyword arguments in Python and what a result remembers.

A config checks itself when it is made: types, bounds, choices, empty words, files and names that are not there. Paths
of the home folder are expanded. torch is not imported here, so `--help` and errors of usage answer at once.

In Python a model may also be a module, an opened model or a result, and data a pair of opened images; such objects pass
unchecked. The first classes hold options that several commands share; `title` is the heading of their options in
`--help`. The docstring of a command's class is its help: a line, then examples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field

from raptor.checks import (
    check_out,
    checked,
    data_name,
    existing_file,
    existing_head,
    expand_home,
    model_name,
    near_miss,
    run_name,
    shown,
    target,
    whole_number,
)
from raptor.recipes import load_recipe

Whole = Annotated[int, BeforeValidator(whole_number)]
Number = Annotated[Whole, Field(ge=1, le=10**9)]
NumberOrNone = Annotated[Whole, Field(ge=0, le=10**6)]
Batch = Annotated[Whole, Field(ge=1, le=10**6)]
Several = Annotated[int, Field(ge=1, le=1024)]
Side = Annotated[Whole, Field(ge=1, le=4096)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Target = Annotated[str, AfterValidator(target)]
File = Annotated[str, AfterValidator(existing_file)]

# Good learning rates relative to AdamW's. Muon's best one was twice AdamW's on both models tried: the built-in teacher
# (R2 .827 against .791 after 200 steps) and DINOv2-S (.643 against .579 after the same images).
RATES = {"adamw": 1.0, "muon": 2.0}

# What a terminal gives. In Python these may be objects as well.
if TYPE_CHECKING:
    Model: TypeAlias = Any
    Models: TypeAlias = Any
    Run: TypeAlias = Any
    Data: TypeAlias = Any
    Sets: TypeAlias = Any
    Lengths: TypeAlias = Any
    Head: TypeAlias = Any
else:
    Model = Annotated[str, AfterValidator(model_name)]
    Models = list[Model]
    Run = Annotated[str, AfterValidator(run_name)]
    Data = list[Annotated[str, AfterValidator(data_name)]]
    Sets = list[str]
    Lengths = list[int]
    Head = Annotated[str, AfterValidator(existing_head)]

# Entries of a recipe without effect on stage 1.
_OF_STAGE_2 = ("head_weight", "hand_over", "average_last", "stage2_weights")
# What `open_vit` and `open_pair` take.
_OPENING = ("weights", "trust_hub", "size", "pretrained", "teacher", "allow_other_teacher")


@dataclass(kw_only=True)
class Config:
    """What all configs do.

    POSITIONAL are the options that may be given without their name, by their place. IN_PARALLEL says that the processes
    of torchrun share the images; any other command would do the same work in each, and write the same files.
    """

    title: ClassVar[str] = ""
    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    IN_PARALLEL: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kinds = self.kinds()
        for f in dataclasses.fields(self):
            value = expand_home(getattr(self, f.name))
            # A default is right, and may be of another type: the entries of a recipe are None until it is read.
            if value is not f.default:
                value = checked(shown(type(self), f.name), kinds[f.name], value)
            setattr(self, f.name, value)
        out = getattr(self, "out", None)
        if isinstance(out, str):
            for words in (getattr(self, "data", None), getattr(self, "val", None)):
                check_out(out, words)

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """The type of each option, with its bounds."""
        # Bounds stand in Annotated, which get_type_hints takes off by default.
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: hints[f.name] for f in dataclasses.fields(cls)}

    @classmethod
    def requires(cls, option: str) -> bool:
        """Whether an option has to be given."""
        # A class has no attribute for a field without a default.
        return not hasattr(cls, option)

    @classmethod
    def of(cls, /, *positional: Any, **options: Any) -> Self:
        """The config of a call from Python; unknown names are a TypeError, as of any function."""
        if len(positional) > len(cls.POSITIONAL):
            raise TypeError(f"takes {len(cls.POSITIONAL)} positional arguments, got {len(positional)}")
        given = dict(zip(cls.POSITIONAL, positional))
        twice = given.keys() & options.keys()
        if twice:
            raise TypeError(f"got two values for {', '.join(sorted(twice))}")
        for name in options:
            if name not in cls.kinds():
                raise TypeError(f"unexpected argument {name!r}{near_miss(name, cls.kinds())}")
        return cls(**given, **options)

    def opening(self) -> dict[str, Any]:
        """How its model is opened: the arguments of `open_vit` and `open_pair` that this config has."""
        return {name: getattr(self, name) for name in _OPENING if hasattr(self, name)}


@dataclass(kw_only=True)
class Opening(Config):
    """How a model is opened. The options are the teacher's where the command also takes surrogates."""

    title = "model"

    weights: File | None = None
    """a local weight file for the teacher."""
    # Code of a stranger runs only where somebody says so.
    trust_hub: bool = False
    """run the code of a torch.hub repository, for hub/REPO:ENTRY."""

    def weights_name(self) -> str:
        """What tells this model from the published one of its name, for the default folder of its results."""
        return ""


@dataclass(kw_only=True)
class Sized(Opening):
    title = "model"

    size: int | None = None
    """image size."""


@dataclass(kw_only=True)
class OpeningModel(Sized):
    """How a model that may be untrained is opened."""

    title = "model"

    pretrained: bool = True
    """fetch published weights; false gives the same model untrained."""

    def weights_name(self) -> str:
        if self.weights is not None:
            return Path(self.weights).stem
        # An untrained model once took the folder of the trained one: it was refused there, or replaced its results.
        return "" if self.pretrained else "untrained"


@dataclass(kw_only=True)
class OfTeacher(Config):
    title = "model"

    teacher: Model | None = None
    """the teacher of a surrogate, if its folder does not name it or the name fails to open."""
    allow_other_teacher: bool = False
    """compare with a teacher that the surrogate was not made from; the results say so."""


@dataclass(kw_only=True)
class OnDevice(Config):
    title = "machine"

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda."""


@dataclass(kw_only=True)
class Running(OnDevice):
    """Where and in which precision a command runs, and how it reads images."""

    title = "machine"
    IN_PARALLEL = True

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto, fp32 or bf16."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    """processes that decode images; chosen by images and cores."""
    skip_bad: bool = False
    """skip unreadable images instead of stopping."""


@dataclass(kw_only=True)
class OnData(Config):
    """Which images are read."""

    title = "images"

    data: Data | None = None
    """images: a folder, zip archives, scenes, cifar10, hf/NAME:split, wds/PATTERN; several are joined, with labels
    where all have the same classes. By default those of the run, else scenes."""
    val: Data | None = None
    """other images to judge on, instead of the held-out part of the data."""
    split: str | None = None
    """val (held out), train, all, or one of the data's own parts, such as test. By default val; of a plain folder all,
    where nothing is fitted."""


@dataclass(kw_only=True)
class Measuring(OnData):
    """What a command measures on."""

    title = "images"

    num_images: Number = 1000
    """how many images."""
    batch_size: Batch = 64
    """images per forward pass."""


@dataclass(kw_only=True)
class Fitting(Config):
    """How many images something is fitted on."""

    title = "images"

    train_images: Number | None = None
    """use only this many training images."""


@dataclass(kw_only=True)
class HeadClasses(Config):
    title = "images"

    classes: File | None = None
    """a file with the classes of the model's head, one per line; ImageNet's WordNet ids need none."""


@dataclass(kw_only=True)
class GivenHead(HeadClasses, Fitting):
    """The head for a teacher that has no classifier; a ridge head is fitted on training images."""

    title = "images"

    head_file: File | None = None
    """a linear head, for a teacher that has none or to replace its own."""


@dataclass(kw_only=True)
class Training(Fitting):
    """How long-running training is interrupted, continued and planned."""

    title = "machine"

    seed: Seed = 0
    """of initialisation, data order, augmentation and drops."""
    # On a CPU it does not pay.
    compile: bool | None = None
    """compile the blocks; by default on a GPU only."""
    # By the clock and not by the step: a stage on ImageNet takes hours.
    checkpoint_minutes: Weight = 10.0
    """minutes between checkpoints; one is also written before each validation. 0 is after every step."""
    dry_run: bool = False
    """open and check everything, measure a few steps, print memory, images/s, time and size for 1 and more devices;
    write nothing."""


def _entry(otherwise: Any) -> Any:
    """A recipe's entry: None until the recipe is read, and `otherwise` where that leaves the entry out."""
    return field(default=None, metadata={"otherwise": otherwise})


@dataclass(kw_only=True)
class Recipe(Config):
    """Everything that decides how a surrogate is trained. An entry that is not given is the named recipe's; where that
    leaves it out, it is the one declared here."""

    title = "training"

    recipe: str = "default"
    """default, adamw, quick, long, long-patches, paper, authors, vitb16, vitb16-varied, vitb16-coordinates,
    vitb16-head, or a YAML file; options such as --lr override its entries."""
    budget: str = _entry("120s")
    """120s, 5m, 3000steps or 20epochs, in all; the recipe says how the stages share it."""
    batch_size: Batch = _entry(64)
    """images per step over all devices together."""
    optimizer: Literal["muon", "adamw"] = _entry("adamw")
    """`muon` (for matrices, with AdamW for the rest) or `adamw`."""
    lr: Rate = _entry(1e-3)
    """peak learning rate. Without it, that of the recipe: twice as large if its optimizer is changed to muon, half as
    large if it is changed to adamw."""
    min_lr: Weight = _entry(1e-6)
    """learning rate at the end of each stage."""
    weight_decay: Weight = _entry(1e-4)
    """weight decay of all trained parameters."""
    warmup: Share = _entry(0.032)
    """share of each stage with a linear warm-up."""
    clip: Rate = _entry(1.0)
    """largest norm of a gradient."""
    block: Literal["teacher", "paper"] = _entry("teacher")
    """`teacher` (a copy of a block of the phase) or `paper`."""
    conditioning: Literal["table", "mlp", "none"] = _entry("table")
    """`table`, `mlp` (the paper's depth scaling) or `none`."""
    copy: Literal["middle", "first", "last", "representative"] = _entry("middle")
    """which teacher block of a phase is copied: middle, first or last; with `method` function by default the
    representative, which replaces the phase at the least cost."""
    adapters: Annotated[int, Field(ge=0, le=10**5)] = _entry(0)
    """rank of what each depth adds to the matrices of its copied block (0: none). The blocks are then no longer
    purely tied; the added parameters are counted."""
    adapted: Literal["all", "mlp"] = _entry("all")
    """the matrices that adapters change: `all`, or only those of the `mlp`."""
    normalise: Literal["none", "layer", "group", "coordinate"] = _entry("group")
    """divide each squared error by the variance of its `layer`, its layer and token `group`, each `coordinate` of
    that, or `none`. `coordinate` is for models in which a few coordinates are far larger than the others."""
    cosine: Weight = _entry(0.0)
    """weight of a cosine loss beside the squared error."""
    # With 0 nothing is computed, so that the losses stay the same to the last bit.
    head_weight: Weight = _entry(0.0)
    """weight in stage 2 of KL(teacher || student) of the head's classes, e.g. .005; needs a head, or labels to fit
    one."""
    hand_over: Part = _entry(0.0)
    """share of the steps of stage 2 in which each phase hands over after a random number of its steps, as depth on
    demand does; with `head_weight` every phase's end is then read by the head. e.g. .25."""
    lam: Part = _entry(0.5)
    """share of teacher forcing in the loss at the start of stage 1."""
    lam_until: Annotated[float, Field(ge=0, allow_inf_nan=True)] = _entry(0.25)
    """share of stage 1 after which there is no teacher forcing; `inf` keeps it as it is."""
    augment: Literal["none", "crop"] = _entry("crop")
    """`crop` (random resized crops and flips) or `none` (centre crops, as the paper)."""
    crop_scale: tuple[float, float] = _entry((0.35, 1.0))
    """share of the area that a random crop keeps."""
    mixup: Annotated[float, Field(ge=0, le=1000)] = _entry(0.0)
    """Beta parameter by which each image is mixed with another of its batch (labels play no part)."""
    cutmix: Part = _entry(0.0)
    """share of the steps that paste a rectangle of another image instead of mixing, e.g. .5."""
    jitter: Part = _entry(0.0)
    """how far brightness, contrast and saturation of each image change, e.g. .4."""
    grey: Part = _entry(0.0)
    """share of the images without colour, e.g. .2."""
    sizes: list[Side] | None = _entry(None)
    """image sizes, one of which each step draws, for a model that takes several, e.g. 224 280."""
    first_size_until: Share = _entry(0.0)
    """share of the run with the first of two `sizes`; the rest has the second. 0 draws one in each step."""
    average_last: Share = _entry(0.0)
    """share of the last stage over which the weights are averaged; the surrogate gets the mean, e.g. .2."""
    epoch_images: Annotated[Whole, Field(ge=0, le=10**12)] = _entry(0)
    """images that a budget in epochs counts as one; 0 for the training images."""
    stage1_share: Part = _entry(0.5)
    """share of the budget that stage 1 gets."""
    stage1_weights: dict[str, float] | None = _entry(None)
    """weight of each token group in the losses of stage 1, as {cls: .5, patches: .5}; in a recipe only."""
    last_phase_weights: dict[str, float] | None = _entry(None)
    """the weights of the last phase in stage 1; in a recipe only."""
    stage2_weights: dict[str, float] | None = _entry(None)
    """the weights in stage 2; in a recipe only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._complete(self._named())
        if self.first_size_until and len(self.sizes or ()) != 2:
            raise ValueError("--first_size_until goes from one size to another: give two --sizes, such as 160 224")

    def _complete(self, named: dict[str, Any]) -> None:
        """Give every entry that is None its value, from the recipe that is named or else from its declaration."""
        # Kept from before: once the entries are filled in, a typed rate and the recipe's look the same.
        rate = self.lr
        for f in dataclasses.fields(Recipe):
            if f.name != "recipe" and getattr(self, f.name) is None:
                setattr(self, f.name, named.get(f.name, f.metadata["otherwise"]))
        if rate is None:
            # A rate belongs to an optimizer: with another one, the recipe's rate becomes what that one needs.
            meant_for = named.get("optimizer", "adamw") if "lr" in named else "adamw"
            self.lr *= RATES[self.optimizer] / RATES[meant_for]

    def _named(self) -> dict[str, Any]:
        """The entries of the recipe that is named, in their types; ValueError that names a wrong one."""
        found = load_recipe(self.recipe)
        kinds = {name: kind for name, kind in Recipe.kinds().items() if name != "recipe"}
        unknown = sorted(found.keys() - kinds.keys())
        if unknown:
            hint = near_miss(unknown[0], kinds, ", ".join(sorted(kinds)))
            raise ValueError(f"recipe {self.recipe} has unknown entries: {', '.join(unknown[:6])}{hint}")
        for name, value in found.items():
            found[name] = checked(f"--{name}", kinds[name], value)
        return found

    def entries(self) -> dict[str, Any]:
        """The entries without the recipe's name: they alone decide the training."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe) if f.name != "recipe"}


# One class per command. `OnModel` and `OnSurrogate` are what several of them begin with.


@dataclass(kw_only=True)
class OnModel(OpeningModel):
    POSITIONAL: ClassVar[tuple[str, ...]] = ("model",)

    model: Model = field(kw_only=False)
    """timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, a weight file, the folder of a model or of a run."""
    out: str | None = None
    """folder of the results; by default the run's own, else runs/COMMAND-MODEL."""


@dataclass(kw_only=True)
class OnSurrogate(Sized, OfTeacher, Measuring, GivenHead, Running):
    POSITIONAL = ("run",)

    run: Run = field(kw_only=False)
    """a run folder, a surrogate folder, or scenes-k2, scenes-k3."""
    out: str | None = None
    """folder of the results; by default the run's own."""
    seed: Seed = 0
    """of everything that is drawn at random."""


@dataclass(kw_only=True)
class AtTerminal(Config):
    """Options of every command that are no arguments in Python."""

    title = "terminal"

    config: list[str] | None = None
    """YAML files with options; what is typed wins."""
    module: str | None = None
    """FILE.py:NAME, a model of your own, or the teacher of a run; runs that file."""
    json: bool = False
    """print the result as JSON."""


def at_terminal(kind: type[Config]) -> dict[str, Any]:
    """The types of these options, as far as a command has them."""
    kinds = AtTerminal.kinds()
    if not kind.requires(kind.POSITIONAL[0]):  # it takes no model
        del kinds["module"]
    return kinds


@dataclass(kw_only=True)
class DemoConfig(OnDevice):
    """Phases to report on the built-in model, surrogate and scenes, without a network.

    raptor demo --out runs/demo
    """

    POSITIONAL = ("out",)

    out: str = "runs/demo"
    """run folder."""
    num_images: Number = 512
    """held-out images of the phases and the certificate; the other measurements take fewer."""


@dataclass(kw_only=True)
class ModelsConfig(Config):
    """Names that can be opened, or the models that a weight file fits.

    raptor models dinov2
    raptor models '*siglip*'
    raptor models --for weights.pth
    """

    POSITIONAL = ("filter",)

    filter: str = ""
    """a part of the name, or a pattern with `*`."""
    # `for` is a keyword of Python. The command line leaves the underscore out.
    for_: File | None = None
    """only the timm models that this weight file fits."""


@dataclass(kw_only=True)
class StudyConfig(OnModel, OnData, Running):
    """Phases and dynamics of one model on your own images, in a tenth of their time, and one page.

    raptor study scenes
    raptor study timm/vit_small_patch14_reg4_dinov2.lvd142m --data photos/
    """

    IN_PARALLEL = False

    full: bool = False
    """measure as much as `raptor phases` and `raptor dynamics` do by themselves; it takes about ten times as long."""


@dataclass(kw_only=True)
class PhasesConfig(OpeningModel, OfTeacher, Measuring, Running):
    """Layer-layer similarity, the phases depth falls into, and the heatmap figure.

    raptor phases scenes --data scenes --k 2 3 4
    raptor phases timm/vit_base_patch14_reg4_dinov2.lvd142m timm/deit3_base_patch16_224.fb_in1k --data photos/
    """

    POSITIONAL = ("models",)

    models: Models = field(kw_only=False)
    """one or more of timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes, a weight file or a run folder, whose
    teacher and surrogate are then shown side by side."""
    k: list[Several] | None = None
    """how many phases to cut depth into; several at once. By default those of 2, 3 and 4 that there is room for."""
    method: Literal["maxcut", "dp", "function"] = "maxcut"
    """`maxcut` (hierarchical, phases nest), `dp` (exact for an additive score), or `function` (exact for the cost of
    replacing the blocks of a phase by one of them)."""
    # As the paper cuts: pooled tokens give its phases on the DINOv2-S fine-tune, and all tokens do not.
    tokens: str = "pooled"
    """which similarity is cut: all, cls, registers, patches or pooled (cls + mean patch)."""
    standardise: bool = False
    """divide each coordinate by its deviation first, so that a few huge ones do not dominate."""
    twin: bool | None = None
    """also measure the model's untrained twin on up to 64 images; by default where that takes less than 20 s."""
    out: str | None = None
    """folder of the results; by default the run's own, else runs/phases-MODEL."""

    def __post_init__(self) -> None:
        # At a terminal these are lists already. In Python one number and one model stand by themselves.
        if isinstance(self.k, int):
            self.k = [self.k]
        if not isinstance(self.models, list):
            self.models = [self.models]
        super().__post_init__()
        if self.weights is not None and len(self.models) > 1:
            raise ValueError("--weights goes with one model: write timm/NAME@FILE for several")


@dataclass(kw_only=True)
class DistillConfig(OnModel, OnData, Recipe, Training, GivenHead, Running):
    """Distil a ViT into k weight-tied recurrent blocks: a surrogate.

    raptor distill scenes --data scenes --k 3 --budget 60s --out runs/scenes-k3
    raptor distill timm/vit_base_patch14_reg4_dinov2.lvd142m --data imagenet/ --k 3 --recipe paper
    """

    POSITIONAL = ("model", "data")

    k: Several | Target | None = None
    """number of tied blocks (3 unless `phases` are given), or `recovery=.95` (of a ridge probe) or `r2=.6` (at every
    layer) for the smallest number that reaches this on held-out images. The scores of the k that is chosen are of the
    same images, so they flatter it a little."""
    phases: Lengths | None = None
    """phase lengths, e.g. 7 3 2, instead of phases cut here."""
    method: Literal["maxcut", "dp", "function"] = "maxcut"
    """how depth is cut: `maxcut` or `dp` of the teacher's similarity, or `function`, by what replacing its blocks by
    one another costs."""
    tokens: str = "pooled"
    """which similarity is cut: all, cls, registers, patches or pooled (cls + mean patch)."""
    out: str | None = None
    """run folder; continued when it already holds this run and is not finished."""
    stage: Literal["all", "1", "2"] = "all"
    """`all`, `1` or `2`; a stage that runs without the other keeps its share of the budget. Stage 2 by itself goes on
    from a `start`."""
    start: Model | None = None
    """a surrogate folder or built-in to start from instead of the recipe's initial blocks. With the folder of a
    finished run it goes on from that run's weights, in another folder."""
    num_images: Number = 1024
    """held-out images of the validation curve, and training images of the similarity that phases are cut from."""
    checkpointing: bool = False
    """recompute activations in the backward pass to save memory."""
    track: Literal["wandb", "tensorboard"] | None = None
    """also log to `wandb` or `tensorboard` (extras)."""
    split: str = "val"
    """val (held out), or one of the data's own parts, such as test."""

    def __post_init__(self) -> None:
        is_by_function = self.method == "function"
        if is_by_function and self.copy is None:
            # Before the recipe is read, whose own `copy` would otherwise take this place.
            self.copy = "representative"
        super().__post_init__()
        if self.phases is not None and self.method != "maxcut":
            raise ValueError(f"--method {self.method} cuts depth, and --phases says where: leave out one of them")
        if self.copy == "representative" and not is_by_function:
            raise ValueError("--copy representative copies what --method function finds: add it, or change --copy")

    def _complete(self, named: dict[str, Any]) -> None:
        for name in _OF_STAGE_2:
            value = getattr(self, name)
            # Only a typed value is refused: a recipe describes both stages, which may run one after the other.
            if self.stage == "1" and value and value != named.get(name):
                raise ValueError(f"--{name} is of stage 2, which --stage 1 leaves out: leave out one of them")
        super()._complete(named)


@dataclass(kw_only=True)
class EvaluateConfig(OnSurrogate):
    """The certificate of a surrogate: how faithful it is on held-out images, layer by layer.

    raptor evaluate runs/scenes-k3 --data scenes
    """

    shift: Sets | None = None
    """further sets of images, one row of results for each: data, or noise, blur, jpeg, contrast of the held-out images,
    with a severity of 1 to 5 as in noise:5 (3 by default)."""
    autonomous: Model | None = None
    """a run with the same phases, distilled with --conditioning none: what it loses is the price of non-autonomy."""
    train_images: Number | None = None
    """training images that null models and a ridge head are fitted on; by default 1,000, and the head of the run."""
    eps: Rate | None = None
    """relative error that Definition 1 is judged by at every layer; by default the smallest one that holds."""
    sample_images: NumberOrNone = 128
    """held-out images for stitching, and for rate and distortion: L + 11 forward passes for each; 0 leaves both out."""


@dataclass(kw_only=True)
class HeadConfig(OnSurrogate):
    """Refit the norm and head of a surrogate to its teacher's outputs, without labels.

    raptor head runs/scenes-k3 --data scenes
    """

    budget: str = "60s"
    """of training: 60s, 5m, 300steps or 2epochs."""
    lr: Rate = 1e-3
    """peak learning rate of AdamW."""


@dataclass(kw_only=True)
class ProbeConfig(OnModel, OfTeacher, OnData, HeadClasses, Fitting, Running):
    """Linear probes on a frozen model; given a run, on the surrogate and on its teacher alike.

    raptor probe runs/scenes-k3 --task depth --data scenes
    """

    task: Literal["classify", "segment", "depth"] = "classify"
    """classify, segment or depth. Segment and depth take scenes, ade20k:PATH or nyuv2:PATH as data."""
    lr: list[Rate] | None = None
    """learning rates, all trained in one backbone pass; by default twelve around the task's own."""
    budget: str | None = None
    """of training for each seed: 10epochs, or 500steps or 60s of the task's own epochs, which are the default. The
    steps that fit into seconds are counted once, for the teacher, and hold for both."""
    batch_size: Batch | None = None
    """images per step; by default the task's own."""
    seed: list[Seed] = field(default_factory=lambda: [0])
    """several give mean and deviation."""
    layer: int | None = None
    """the state to probe (0..L); by default the last."""
    num_images: Number | None = None
    """use only this many held-out images."""
    closed_form: Literal["ridge"] | None = None
    """ridge: heads by ridge regression on cached features, for a quick look at classification."""
    init_head: Head = "own"
    """where the classifier starts: own (the model's own linear head, where it has one of as many classes), random, or
    the file of a published linear head. Its outputs are matched with the data's classes by name where the file holds
    names, as that of a probe does; else only their number is compared."""


@dataclass(kw_only=True)
class DynamicsConfig(OnModel, OfTeacher, Measuring, GivenHead, Running):
    """Depth as a dynamical system: direction, stability, rank, modes and basins, and interventions.

    raptor dynamics scenes --data scenes
    raptor dynamics runs/scenes-k3 --data scenes
    """

    num_classes: NumberOrNone = 5
    """how many classes basins are drawn of: those with the most images; 0 leaves basins out."""
    sample_images: Number = 64
    """images of the costly parts: ranks of updates, perturbations and interventions."""
    stability: bool = True
    """also follow perturbed states, in fp32."""
    eps: tuple[Rate, ...] = (1e-3, 1e-2, 1e-1)
    """sizes of the perturbations."""
    perturbation: Literal["relative", "paper"] = "relative"
    """`relative`, eps times each token's norm, or `paper`, eps times a standard normal vector."""
    k: Several = 3
    """phases that depth is cut into (by max-cut) where they are not given; a surrogate has its own."""
    phases: list[int] | None = None
    """phase lengths instead, e.g. 7 3 2."""
    interventions: bool = True
    """also swap layers, run phases longer and shorter, and run a surrogate past its last layer."""
    # Off, because eight images take a minute and a half of one core on the built-in models.
    tangents: bool = False
    """also Jacobian growth, Lyapunov exponents, fixed points and transplants of up to 8 images, beside an untrained
    twin: minutes."""
    seed: Seed = 0
    """of the perturbations, and of the weights of an untrained model."""


@dataclass(kw_only=True)
class Tool(OnSurrogate):
    """What recurrence is good for: the next four."""

    IN_PARALLEL = False


@dataclass(kw_only=True)
class DepthConfig(Tool):
    """Depth on demand: what it saves to end phases early, image by image, and what it costs.

    raptor depth scenes-k3
    raptor depth runs/scenes-k3 --exit 'turn<.2' 'entropy<1'
    """

    # None, because time is measured: a CPU with its small cache wants few images, a GPU many.
    batch_size: Batch | None = None  # type: ignore[assignment]
    """images per batch, which they leave as their phase ends; by default 8 on a CPU and 256 on a GPU."""
    exit: list[str] | None = None
    """rules to try, such as turn<.02, second<.1, entropy<.5, kl<.01 or random<.2; by default each rule with seven
    thresholds that fit the model."""


@dataclass(kw_only=True)
class WatchConfig(Tool):
    """Watch a teacher: an image on which its surrogate fails to follow it is unusual.

    raptor watch scenes-k3 --calibrate scenes --data photos/
    raptor watch scenes-k3 --unusual noise blur contrast pgd pgd-aware
    """

    calibrate: Data | None = None
    """usual images, which say what is usual and set the threshold; by default half of the images that --data names."""
    unusual: Sets | None = None
    """sets of images that are known to be unusual, by which scores are compared, while those of --data are known to be
    usual: data, noise, blur, jpeg or contrast of the images of --data (severity as in noise:5), or an attack on them:
    pgd, and pgd-aware, which knows the watcher."""
    false_alarms: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """wished share of usual images that are alarms."""


@dataclass(kw_only=True)
class EditConfig(Tool):
    """Edit the state at the end of a phase, so that an image is taken for another class.

    raptor edit scenes-k3 --to ball --at 2
    """

    to: str | None = None
    """the class, by name or number."""
    at: int | None = None
    """the phase, 1 to k; by default each of them."""
    num_images: Number = 128
    """how many images are edited."""


@dataclass(kw_only=True)
class CorrectConfig(Tool):
    """Disturb a state and run further steps of its phase: how much of the lost agreement comes back?

    raptor correct scenes-k3 --noise .3 --extra 8
    """

    at: int | None = None
    """the phase, 1 to k; by default each of them."""
    num_images: Number = 256
    """how many images."""
    extra: Annotated[int, Field(ge=1, le=64)] = 8
    """largest number of further steps."""
    noise: Weight = 0.3
    """length of the noise on the state that enters the phase, as a share of each token's norm; 0 leaves it out."""
    beside: Model | None = None
    """another surrogate of the same teacher, such as one that was trained with noise."""


@dataclass(kw_only=True)
class ReportConfig(Opening, OfTeacher, OnDevice, OnData):
    """One self-contained, interactive page of whatever a run folder holds.

    raptor report runs/scenes-k3
    """

    POSITIONAL = ("run",)

    run: Run = field(kw_only=False)
    """a run folder: the --out of phases, distill, evaluate, probe or dynamics."""
    out: str | None = None
    """where the page goes; RUN/report.html by default."""
    num_images: NumberOrNone = 4
    """how many images to show through depth; 0 for none."""


@dataclass(kw_only=True)
class StatesConfig(OnModel, OfTeacher, OnData, HeadClasses, Running):
    """Features of every image (of a run, the surrogate's), per layer and token group, streamed to disk.

    raptor states timm/vit_base_patch14_reg4_dinov2.lvd142m --data photos/ --layers 3 6 9
    """

    layers: list[int] | None = None
    """which states, 0 (after the embedding) to L; by default the last."""
    parts: list[Literal["attn", "attn_out", "mlp_out", "resid_mid"]] | None = None
    """also parts of the blocks that end at these layers: attn (attention weights, (N, heads, T), of the queries of each
    group), attn_out and mlp_out (what both branches add to the state) and resid_mid (the state between them)."""
    split: str = "all"
    """all, train (without the held-out images), val, or one of the data's own parts; of --val where that is given."""
    num_images: Number | None = None
    """use only this many images."""
    batch_size: Batch = 64
    """images per forward pass."""
    pool: bool = True
    """the mean over the tokens of each group, (N, D); false keeps every token, (N, tokens, D)."""


@dataclass(kw_only=True)
class ShowConfig(OnModel, OfTeacher, OnDevice):
    """Pictures of one image inside a model (of a run, the surrogate): attention, PCA, logit lens, turns.

    raptor show scenes cat.jpg
    raptor show runs/scenes-k3 cat.jpg --what attention --layers 3 6 12
    """

    POSITIONAL = ("model", "image")

    image: File = field(kw_only=False)
    """an image file."""
    what: list[Literal["attention", "pca", "lens", "turn"]] | None = None
    """attention (of the cls token, by head, and rolled out), pca (of the patches, as in DINOv2's paper), lens (the
    final norm and head on every layer's state) and turn (by how much each block turns each patch); by default all,
    without lens where there is no classifier."""
    layers: list[int] | None = None
    """which layers are drawn, 1 to L; by default six spread over depth."""


@dataclass(kw_only=True)
class ExportConfig(OfTeacher, Measuring):
    """A surrogate as a file for other programs, measured: size, parity, speed, agreement.

    raptor export runs/scenes-k3 --to onnx --weights int8
    raptor export runs/scenes-k3 --to blocks --weights fp16 --out shared
    """

    POSITIONAL = ("run",)

    run: Run = field(kw_only=False)
    """a run folder, a surrogate folder, or scenes-k2, scenes-k3."""
    to: Literal["pt2", "onnx", "timm", "blocks", "folder"] = "pt2"
    """pt2 (torch.export), onnx, timm (a checkpoint for timm.create_model), blocks (a folder with only the tied blocks,
    to share: the rest is the teacher's) or folder (a folder with all weights, also made from blocks and --teacher)."""
    weights: Literal["fp32", "fp16", "int8", "int4"] = "fp32"
    """fp32, fp16, or int8 or int4 for the linear layers of the blocks."""
    num_images: Number = 128
    """how many held-out images the file is compared on."""
    batch_size: Side = 32
    """images per forward pass."""
    size: int | None = None
    """image size; a file of pt2 or onnx takes only this one."""
    trust_hub: bool = False
    """run the code of a torch.hub repository, for hub/REPO:ENTRY."""
    out: str | None = None
    """folder for the file, export.json and the model card; by default export-TO-WEIGHTS in the run's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to in ("blocks", "folder") and self.weights.startswith("int"):
            raise ValueError(f"--to {self.to} stores fp32 or fp16: take --weights fp16, or --to timm")


@dataclass(kw_only=True)
class ExploreConfig(OpeningModel, OfTeacher, OnDevice):
    """A page to try images and perturbations on, served only to this machine (loopback).

    raptor explore runs/scenes-k3
    """

    POSITIONAL = ("model",)

    model: Model = field(kw_only=False)
    """a run folder (teacher and surrogate side by side) or any model name."""
    # Gradio's own default.
    port: Annotated[int, Field(ge=1, le=65535)] = 7860
    """of the page."""


@dataclass(kw_only=True)
class TeacherConfig(Training, Running):
    """Train a small ViT classifier with AdamW, and save it to OUT/teacher, where the other commands find it.

    raptor train-teacher --data scenes --size 48 --patch 8 --dim 128 --depth 12 --heads 4
    """

    POSITIONAL = ("shape", "data")

    shape: str = "vit_tiny_patch16_224"
    """a timm model name that gives the architecture; other options change its shape."""
    data: Data = "scenes"
    """labelled images, several joined where all have the same classes."""
    val: Data | None = None
    """other images to judge on, instead of the held-out part of the data."""
    num_images: Number | None = None
    """use only this many held-out images."""
    out: str = "runs/teacher"
    """run folder; continued when it already holds this run."""
    size: int | None = None
    """image size (by default 48 for scenes, else the shape's)."""
    patch: Side | None = None
    """patch side in pixels."""
    dim: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """width."""
    depth: Annotated[int, Field(ge=2, le=1024)] | None = None
    """number of blocks."""
    heads: Side | None = None
    """attention heads."""
    registers: Annotated[int, Field(ge=0, le=4096)] = 0
    """register tokens."""
    drop: float = 0.0
    """stochastic depth p: each block is dropped per sample with this probability, the same at every depth."""
    rescale: bool = False
    """divide kept updates by 1 - p."""
    budget: str = "30epochs"
    """30epochs, 5000steps, or 120s."""
    batch_size: Batch = 256
    """images per step over all devices together."""
    lr: Rate = 1e-3
    """peak learning rate; a linear warm-up comes before it, a cosine to 0 after it."""
    weight_decay: Weight = 0.05
    """weight decay of matrices."""
    warmup: Share = 0.05
    """fraction of the run with a linear warm-up."""
    smoothing: Share = 0.1
    """label smoothing."""
    mixup: Weight = 0.0
    """parameter of the Beta distribution that mixup draws from; 0 turns it off."""
    cutmix: Weight = 0.0
    """parameter of the Beta distribution that cutmix draws from; 0 turns it off."""
    augment: Literal["none", "crop"] = "crop"
    """`crop` or `none`."""
    crop_scale: tuple[float, float] = (0.35, 1.0)
    """share of the area that a random crop keeps."""


COMMANDS: dict[str, type[Config]] = {
    "demo": DemoConfig,
    "models": ModelsConfig,
    "study": StudyConfig,
    "phases": PhasesConfig,
    "distill": DistillConfig,
    "evaluate": EvaluateConfig,
    "head": HeadConfig,
    "probe": ProbeConfig,
    "dynamics": DynamicsConfig,
    "depth": DepthConfig,
    "watch": WatchConfig,
    "edit": EditConfig,
    "correct": CorrectConfig,
    "report": ReportConfig,
    "states": StatesConfig,
    "show": ShowConfig,
    "export": ExportConfig,
    "explore": ExploreConfig,
    "train-teacher": TeacherConfig,
}
"""Command -> its options. The function of a command has the same name in `raptor.commands`."""
