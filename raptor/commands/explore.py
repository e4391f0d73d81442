"""raptor explore: a local page to drop in an image, perturb a layer, and watch teacher and surrogate."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raptor.config import ExploreConfig
from raptor.data import open_data
from raptor.devices import pick_device, seeded
from raptor.provenance import command
from raptor.report.perturbed_image import figure_perturbed, perturb_image, read_image
from raptor.streaming import folder_of
from raptor.train import Distilled
from raptor.vit.pair import open_pair
from raptor.vit.view import ViT


@command(ExploreConfig)
def explore(config: ExploreConfig) -> None:
    """Serve a page to try images and perturbations, only to this machine (loopback)."""
    model, port = config.model, config.port
    surrogate: ViT | None
    if isinstance(model, Distilled):
        # What distill returned holds both models, so neither is opened again.
        surrogate, of_teacher = model.surrogate, model.teacher
    else:
        device = pick_device(config.device)
        with seeded():
            surrogate, of_teacher = open_pair(folder_of(model), device=device, **config.opening())
    views = {"teacher": of_teacher}
    if surrogate is not None:
        views["surrogate"] = surrogate
    page = build_page(views, of_teacher.classes or [])
    print(f"explore: http://127.0.0.1:{port}, only on this machine; Ctrl-C ends it", file=sys.stderr, flush=True)
    with _own_hosts_only():
        page.launch(
            # Given, so that GRADIO_SERVER_NAME in the environment cannot open the page to a network.
            server_name="127.0.0.1",
            server_port=port,
            max_file_size="10mb",
            share=False,
            quiet=True,
        )


_HOSTS = ("127.0.0.1", "localhost")


@contextmanager
def _own_hosts_only() -> Iterator[None]:
    """Inside, Gradio's server answers only to a Host header of this machine, so that no web page elsewhere can use it
    through a name that points here (DNS rebinding)."""
    try:
        from gradio.routes import App
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ImportError:
        yield
        return
    # Gradio makes its app inside `launch`, so the function that makes it is wrapped.
    create = App.create_app

    def create_guarded(*args: Any, **options: Any) -> Any:
        app = create(*args, **options)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS))
        return app

    App.create_app = staticmethod(create_guarded)
    try:
        yield
    finally:
        App.create_app = create


def example_image() -> str:
    """The file of one of the built-in images, to try the page with."""
    image = open_data("scenes", "val", limit=1, size=224)[0]
    # Gradio shows files of the temporary folder without being asked, and the working folder may be read-only.
    path = Path(tempfile.mkdtemp(prefix="raptor-explore-")) / "scene.png"
    image.save(path)
    return str(path)


EXPLANATION = """Each state of the residual stream is a point; depth moves it. **Run** follows the image through the
blocks, adds a small random vector to the chosen tokens at the chosen layer, and follows it again.

- *Path*: the mean direction of the tokens from layer to layer, seen in the plane in which the teacher's path varies
  most. Where the surrogate's path lies on the teacher's, it takes the same way.
- *Angular speed*: by how much each layer turns a token.
- *Deviation*: how far plain and perturbed states are apart at every later layer. Where it shrinks, depth pulls states
  together."""


def build_page(views: dict[str, ViT], classes: list[str]) -> Any:
    """The Gradio page over one or two models."""
    try:
        import gradio as gr
    except ImportError:
        raise ValueError("explore needs its extra: pip install 'raptor-vit[explore]'") from None
    teacher = views["teacher"]
    groups = ["all", *(name for name, _ in teacher.groups.present())]

    def show(path: str | None, layer: float, group: str, log_eps: float) -> tuple[Any, str]:
        try:
            image = read_image(path)
            found = {name: perturb_image(v, image, int(layer), group, 10.0**log_eps) for name, v in views.items()}
        except ValueError as error:
            # Shown on the page. A traceback in the log would look like a fault of the program.
            raise gr.Error(str(error), print_exception=False) from None
        return figure_perturbed(found, int(layer), group), describe(found, classes)

    # Gradio reports its use over the network unless it is told not to.
    with gr.Blocks(title="raptor explore", analytics_enabled=False) as page:
        beside = f", beside {views['surrogate'].name}" if "surrogate" in views else ""
        gr.Markdown(
            f"# {teacher.name}\n{teacher.num_layers} blocks, {teacher.groups.num_tokens} tokens, dim {teacher.dim}"
            f"{beside}\n\n{EXPLANATION}"
        )
        with gr.Row():
            with gr.Column(scale=1):
                image = gr.Image(value=example_image(), type="filepath", label="image (at most 10 MB)")
                image.preprocess = _file_as_it_is
                layer = gr.Slider(0, teacher.num_layers, value=teacher.num_layers // 2, step=1, label="layer")
                group = gr.Dropdown(groups, value="all", label="tokens")
                log_eps = gr.Slider(-4, 0, value=-1, step=0.25, label="perturbation, log10 of the token's norm")
                button = gr.Button("Run", variant="primary")
            with gr.Column(scale=3):
                plot = gr.Plot(show_label=False)
                text = gr.Markdown()
        inputs = [image, layer, group, log_eps]
        button.click(show, inputs, [plot, text], api_name="show")
        # Draws the example when the page opens, so that nobody meets empty plots.
        page.load(show, inputs, [plot, text], show_progress="hidden", api_name=False)
        for control in (layer, group, log_eps):
            control.change(show, inputs, [plot, text], show_progress="hidden", api_name=False)
    return page


def _file_as_it_is(upload: Any) -> str | None:
    """The path of an uploaded file. Gradio's own would decode it, and log a traceback where it is no image."""
    return None if upload is None else upload.path


def describe(found: dict[str, Any], classes: list[str]) -> str:
    """Predictions of each model, plain and perturbed, as text."""
    lines = []
    for name, result in found.items():
        if result.prediction is None:
            lines.append(f"**{name}** has no head: no prediction.")
            continue
        plain, moved = (
            f"{classes[label] if label < len(classes) else label} ({share:.0%})"
            for label, share in (result.prediction, result.perturbed_prediction)
        )
        lines.append(f"**{name}** sees {plain}; perturbed: {moved}; final deviation {result.deviation[-1]:.2e} rad.")
    return "\n\n".join(lines)
