"""A model of the user's own, which a function of their own file makes: the option --module."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def load_module(where: str) -> Any:
    """The model that a function of the user's own file makes; `where` is FILE.py:FUNCTION. Runs that file."""
    file, _, function = where.rpartition(":")
    if not file or not function:
        raise ValueError(f"--module {where}: write FILE.py:FUNCTION, such as mine.py:make_vit")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"--module {where}: there is no file {file}")
    # As for a script that Python runs: its own file may import what lies beside it.
    sys.path.insert(0, str(path.resolve().parent))
    with _code_of(where, path):
        names = runpy.run_path(str(path), run_name=path.stem)
    if function not in names:
        raise ValueError(f"--module {where}: {file} has no {function}")
    made = names[function]
    # Imported here, because most commands have no module.
    from torch import nn

    from raptor.provenance import note_module
    from raptor.vit.view import ViT

    # Noted once the file has run: a page tells later how the run is opened again.
    note_module(where)
    with _code_of(where, path):
        # A name may stand for a model, or for a function that makes one.
        made = made if isinstance(made, nn.Module | ViT) else made()
    if not isinstance(made, nn.Module | ViT):
        raise ValueError(f"--module {where} gives a {type(made).__name__}: return an nn.Module or an opened model")
    return made


@contextmanager
def _code_of(where: str, path: Path) -> Iterator[None]:
    """Inside, an exception of the user's own code shows the user's frames only, and is an error that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:  # `sys.exit(0)` is no model
        import traceback

        frames = error.__traceback__
        # The frames above are raptor's own and importlib's, which say nothing about the user's fault.
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).resolve() != path.resolve():
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        reason = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ValueError(f"--module {where} raised {type(error).__name__}: {reason}") from None
