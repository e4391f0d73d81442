"""Opening 1.3 million images in tar shards: the first time, from the index, and the memory it takes.

    python benchmarks/data_index.py --folder FOLDER --out docs/results/data-index.json

The set is made once in FOLDER (2.7 GB): the same tiny PNG under 1.3 million names in 130 shards, each with its class
of 1,000. Each measurement is a process of its own that opens the training split; `memory_mib` is its peak, and the
peak for 1,000 images is subtracted for `more_mib`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from raptor.provenance import Provenance

_PER_SHARD = 10_000
_CHILD = """
import json, resource, sys, time
from raptor.data import open_data
began = time.monotonic()
data = open_data(sys.argv[1], "train")
seconds = time.monotonic() - began
data.load(len(data) // 2)
print(json.dumps({"images": len(data), "seconds": seconds,
                  "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def make_shards(folder: Path, num_images: int) -> str:
    """Shards with `num_images` images; those that exist are kept. Gives the pattern that addresses them."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (90, 120, 30)).save(buffer, "PNG")
    content = buffer.getvalue()
    num_shards = -(-num_images // _PER_SHARD)
    for shard in range(num_shards):
        path = folder / f"shard-{shard:04d}.tar"
        if path.exists():
            continue
        with tarfile.open(path.with_suffix(".part"), "w") as tar:
            for i in range(shard * _PER_SHARD, min(num_images, (shard + 1) * _PER_SHARD)):
                for suffix, data in ((".png", content), (".cls", str(i % 1000).encode())):
                    info = tarfile.TarInfo(f"image-{i:08d}{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        os.utime(path.with_suffix(".part"), (1e9, 1e9))  # an index is not kept of what has just changed
        path.with_suffix(".part").rename(path)
    return f"wds/{folder}/shard-{{0000..{num_shards - 1:04d}}}.tar"


def measure(pattern: str, cache: str) -> dict[str, float]:
    """Open the data in a new process."""
    command = [sys.executable, "-c", _CHILD, pattern]
    done = subprocess.run(
        command, env={**os.environ, "RAPTOR_CACHE": cache}, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--images", type=int, default=1_300_000)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    folder = Path(args.folder)
    began = time.monotonic()
    large = make_shards(folder / "large", args.images)
    small = make_shards(folder / "small", 1_000)
    print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    with tempfile.TemporaryDirectory() as cache:
        result: dict[str, Any] = {
            "small": measure(small, cache),
            "first": measure(large, cache),
            "second": measure(large, cache),
        }
        result["index_mib"] = sum(f.stat().st_size for f in Path(cache).rglob("*") if f.is_file()) / 2**20
    result["more_mib"] = result["second"]["memory_mib"] - result["small"]["memory_mib"]
    result["provenance"] = {
        **Provenance.since(began).to_dict(),
        "command": "python benchmarks/data_index.py --folder FOLDER",
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
