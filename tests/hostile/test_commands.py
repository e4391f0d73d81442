"""Bad words at the terminal: each is refused with one line, before any work and without a trace on disk, or works.

A row is `command line :: the thing :: the remedy`; without the last two it works. OUT is a folder that is not there.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hostile_world import Case, check

from raptor.cli import main

PHASES = """
phases :: give MODEL :: --help
phases '' --data images :: MODEL is empty :: leave it out
phases '  ' --data images :: MODEL is empty :: leave it out
phases nope :: 'nope' :: write timm/NAME
phases ./nope :: './nope' :: write timm/NAME
phases -teacher :: -teacher :: did you mean --teacher
phases images --data images :: images is a folder :: --out of distill
phases classes.txt --data images :: classes.txt :: fetch it again
phases timm/nope --data images :: 'nope' :: see raptor models
phases timm/vit_tinny_patch16_224 --data images :: 'vit_tinny_patch16_224' :: did you mean timm/vit_tiny_patch16_224
phases timm/vit_tinny --data images :: 'vit_tinny' :: did you mean timm/vit_tiny
phases timm/vit_tiny_patch16_224.nope --data images :: 'vit_tiny_patch16_224.nope' :: its tags are
phases timm/ --data images :: 'timm/' :: write timm/NAME
phases hf/ --data images :: 'hf/' :: write timm/NAME
phases hub/x --data images :: hub/x :: write hub/REPO:ENTRY
phases hub/x:y --data images :: hub/x:y :: --trust_hub
phases timm/resnet18 --pretrained false --data images :: timm/resnet18 :: choose a ViT
phases timm/vit_tiny_patch16_224 --weights nope.pth --data images :: nope.pth :: check its path
phases timm/vit_tiny_patch16_224@nope.pth --data images :: nope.pth :: there is no weight file
phases timm/vit_tiny_patch16_224 --weights classes.txt --data images :: classes.txt :: fetch it again
phases timm/vit_tiny_patch16_224 --weights images --data images :: images is not a file :: give a .safetensors
phases timm/vit_tiny_patch16_224 --weights head.safetensors --data images :: head.safetensors :: name the model
phases timm/vit_tiny_patch16_224 --weights weights.pth --data images :: weights.pth :: name the model
phases timm/vit_tiny_patch16_224@weights.pth --weights weights.pth --data images :: weight file :: leave out --weights
phases timm/vit_tiny_patch16_224 --pretrained false --size 100000 --data images :: 100000 px :: --size of 1..4096
phases teacher --data images --weights= --out OUT :: --weights is empty :: leave it out
phases teacher --data '' :: --data is empty :: leave it out
phases teacher --data nope :: 'nope' :: give a folder
phases teacher --data scnes :: 'scnes' :: did you mean scenes
phases teacher --data images nope --out OUT :: 'nope' :: give a folder
phases teacher --val nope --data images :: 'nope' :: give a folder
phases teacher --data wds/a{1..10000000000}.tar --out OUT :: a{1..10000000000}.tar :: shorter range
phases teacher --data 'wds/{1..1000}{1..1000}{1..1000}.tar' --out OUT :: {1..1000} :: shorter range
phases teacher --data 'wds/{9..1}.tar' --out OUT :: {9..1} :: runs backwards
phases teacher --data 'wds/{1..9.tar' --out OUT :: {1..9.tar :: check the path or the pattern
phases teacher --data wds/nope.tar --out OUT :: nope.tar :: check the path
phases teacher --data nope.zip --out OUT :: nope.zip :: check the path
phases teacher --data hf/ --out OUT :: 'hf/' :: give a folder
phases teacher --data cifar10:images --out OUT :: images :: give cifar10:PATH
phases teacher --data imagenet:nope --out OUT :: nope :: expected ImageNet
phases teacher --data images --k 0 :: --k :: at least 1
phases teacher --data images --k -1 :: --k :: at least 1
phases teacher --data images --k 5 :: k=5 :: smaller --k
phases teacher --data images --k 99999999999 :: --k :: at most 1024
phases teacher --data images --k two :: --k :: whole numbers
phases teacher --data images --k 2.5 :: --k :: whole numbers
phases teacher --data images --k --out OUT :: --k :: give one
phases teacher --data images --num_images 0 :: --num_images :: at least 1
phases teacher --data images --num_images -5 :: --num_images :: at least 1
phases teacher --data images --num_images 99999999999999999999 :: --num_images :: at most
phases teacher --data images --num_images :: --num_images :: give one
phases teacher --data images --batch_size 0 :: --batch_size :: at least 1
phases teacher --data images --num_workers -1 :: --num_workers :: at least 0
phases teacher --data images --num_workers 99999 :: --num_workers :: at most 1024
phases teacher --data images --split nope :: 'nope' :: use train, val, all
phases teacher --data images --device tpu :: --device :: one of auto, cpu, cuda
phases teacher --data images --precision fp8 :: --precision :: one of auto, fp32, bf16
phases teacher --data images --method nope :: --method :: one of maxcut, dp, function
phases teacher --data images --tokens nope :: 'nope' tokens :: choose from all
phases teacher --data images --tokens registers :: 'registers' tokens :: choose from all
phases teacher --data images --standardise maybe :: --standardise :: true or false
phases teacher --data images --out /proc/x :: /proc/x :: choose another --out
phases teacher --data images --out classes.txt :: classes.txt :: choose another --out
phases teacher --data images --out classes.txt/x :: classes.txt/x :: choose another --out
phases teacher --data images --out= :: --out is empty :: leave it out
phases teacher --bogus 3 :: --bogus :: unknown option
phases teacher --num_imges 3 :: --num_imges :: did you mean --num_images
phases teacher --dat images :: --dat :: did you mean --data
phases teacher --data images --size 0 :: 0 px :: --size of 1..4096
phases teacher --data images --size -3 :: -3 px :: --size of 1..4096
phases teacher --data images --size 7 :: 7 px :: give another --size
phases run --teacher nope :: 'nope' :: write timm/NAME
phases run --teacher ./nope :: './nope' :: write timm/NAME
phases run --teacher timm/nope :: 'nope' :: see raptor models
phases run --teacher run :: run was not made from :: --allow_other_teacher
phases run --weights head.safetensors :: head.safetensors :: name the model
phases teacher --config nope.yaml :: nope.yaml :: check its path
phases teacher --config images :: images :: check its path
phases teacher --config classes.txt :: classes.txt :: write option: value
phases teacher --config= :: --config :: check its path
phases teacher --module nope.py:f :: nope.py :: there is no file
phases --module x :: --module x :: write FILE.py:FUNCTION
phases --module classes.txt: :: --module :: write FILE.py:FUNCTION
"""

DISTILL = """
distill nope --out OUT :: 'nope' :: write timm/NAME
distill teacher --data images --k 0 --out OUT :: --k :: at least 1
distill teacher --data images --k 99 --out OUT :: k=99 :: smaller --k
distill teacher --data images --k x --out OUT :: --k: x is no number :: write 3
distill teacher --data images --phases 2 3 --out OUT :: [2, 3] :: change one
distill teacher --data images --phases 0 4 --out OUT :: [0, 4] :: positive
distill teacher --data images --phases 4 --k 2 --out OUT :: --k 2 :: leave out one
distill teacher --data images --phases x --out OUT :: --phases :: whole numbers
distill teacher --data images --stage 3 --out OUT :: --stage :: one of all
distill teacher --data images --phases 2 2 --stage 2 --batch_size 4 --out OUT :: --stage 2 :: give --start
distill teacher --data images --k x=1 --out OUT :: x=1 :: recovery=.95
distill teacher --data images --k r2=x --out OUT :: r2=x :: recovery=.95
distill teacher --data images --recipe nope --out OUT :: 'nope' :: choose from adamw
distill teacher --data images --recipe deflaut --out OUT :: 'deflaut' :: did you mean default
distill teacher --data images --recipe nope.yaml --out OUT :: 'nope.yaml' :: choose from adamw
distill teacher --data images --recipe ../../etc/passwd --out OUT :: etc/passwd :: choose from adamw
distill teacher --data images --recipe classes.txt --out OUT :: 'classes.txt' :: choose from adamw
distill teacher --data images --budget 0s --out OUT :: '0s' :: write 120s
distill teacher --data images --budget x --out OUT :: 'x' :: write 120s
distill teacher --data images --budget 1e999s --out OUT :: '1e999s' :: write 120s
distill teacher --data images --budget 99999999999999999999999steps --out OUT :: 99999999999999999999999 :: write 120s
distill teacher --data images --budget -1s --out OUT :: '-1s' :: write 120s
distill teacher --data images --phases 2 2 --budget 1steps --batch_size 4 --out OUT :: one step :: --budget 2steps
distill teacher --data images --batch_size 0 --out OUT :: --batch_size :: at least 1
distill teacher --data images --phases 2 2 --batch_size 1000 --out OUT :: batch of 1000 :: give --batch_size
distill teacher --data images --lr 0 --out OUT :: --lr :: more than 0
distill teacher --data images --lr -1 --out OUT :: --lr :: more than 0
distill teacher --data images --lr inf --out OUT :: --lr :: a number
distill teacher --data images --lr nan --out OUT :: --lr :: a number
distill teacher --data images --lr 1e999 --out OUT :: --lr :: a number
distill teacher --data images --block nope --out OUT :: --block :: one of teacher
distill teacher --data images --conditioning nope --out OUT :: --conditioning :: one of table
distill teacher --data images --copy nope --out OUT :: --copy :: one of middle
distill teacher --data images --normalise nope --out OUT :: --normalise :: one of none
distill teacher --data images --augment nope --out OUT :: --augment :: one of none
distill teacher --data images --stage1_share 2 --out OUT :: --stage1_share :: at most 1
distill teacher --data images --stage1_share -1 --out OUT :: --stage1_share :: at least 0
distill teacher --data images --phases 4 --batch_size 4 --stage1_share 0 --stage 1 --out OUT :: _share 0 :: change one
distill teacher --data images --train_images 0 --out OUT :: --train_images :: at least 1
distill teacher --data images --num_images 0 --out OUT :: --num_images :: at least 1
distill teacher --data images --head_file classes.txt --out OUT :: classes.txt :: give a file with weight
distill teacher --data images --head_file nope --out OUT :: nope :: check its path
distill teacher --data images --head_file images --out OUT :: images :: give a safetensors file
distill teacher --data images --seed -1 --out OUT :: --seed :: at least 0
distill teacher --data images --seed 99999999999999999999999 --out OUT :: --seed :: at most
distill teacher --data images --track nope --out OUT :: --track :: one of wandb
distill teacher --data images --classes nope.txt --out OUT :: nope.txt :: check its path
distill teacher --data images --classes images --out OUT :: images :: one class per line
distill teacher --data images --classes head.safetensors --out OUT :: head.safetensors :: UTF-8
distill teacher --data images --tokens nope --out OUT :: 'nope' tokens :: choose from all
distill teacher --data images --val nope --out OUT :: 'nope' :: give a folder
distill teacher --data images --split nope --batch_size 4 --out OUT :: 'nope' :: use train, val, all
distill teacher --data images --phases 2 2 --batch_size 4 --out teacher :: teacher holds :: choose another --out
distill teacher --data images --phases 2 2 --batch_size 4 --out run :: another config :: choose another --out
distill teacher --data images --out classes.txt :: classes.txt :: choose another --out
distill teacher --data images --out /proc/x :: /proc/x :: choose another --out
"""

EVALUATE = """
evaluate :: give RUN :: --help
evaluate nope :: run folder nope :: give the --out
evaluate teacher --data images --out OUT :: teacher is no surrogate :: raptor distill
evaluate run --num_images 0 --out OUT :: --num_images :: at least 1
evaluate run --train_images 0 --out OUT :: --train_images :: at least 1
evaluate run --batch_size 0 --out OUT :: --batch_size :: at least 1
evaluate run --seed -1 --out OUT :: --seed :: at least 0
evaluate run --head_file /etc/passwd --out OUT :: /etc/passwd :: give a file with weight
evaluate run --head_file weights.pth --out OUT :: weights.pth :: not weight and bias
evaluate run --teacher scenes --out OUT :: scenes as it is now :: --allow_other_teacher
evaluate run --teacher nope --out OUT :: 'nope' :: write timm/NAME
evaluate run --weights nope.pth --out OUT :: nope.pth :: check its path
evaluate run --out classes.txt :: classes.txt :: choose another --out
evaluate run --classes nope.txt --out OUT :: nope.txt :: check its path
evaluate run --split nope --out OUT :: 'nope' :: use train, val, all
evaluate run --data nope --out OUT :: 'nope' :: give a folder
evaluate run --size 5000 --out OUT :: 5000 px :: --size of 1..4096
"""

PROBE = """
probe teacher --task nope --data images --out OUT :: --task :: one of classify
probe teacher --data flat --out OUT :: flat gives no labels :: one folder per class
probe teacher --data images --lr 0 --out OUT :: --lr :: more than 0
probe teacher --data images --lr x --out OUT :: --lr :: numbers
probe teacher --data images --budget 0epochs --out OUT :: cannot read the budget
probe teacher --data images --batch_size 0 --out OUT :: --batch_size :: at least 1
probe teacher --data images --seed x --out OUT :: --seed :: whole numbers
probe teacher --data images --seed -1 --out OUT :: --seed :: at least 0
probe teacher --data images --layer 99 --out OUT :: layer 99 :: 0..4
probe teacher --data images --layer -1 --out OUT :: layer -1 :: 0..4
probe teacher --data images --closed_form nope --out OUT :: --closed_form :: one of ridge
probe teacher --data images --init_head nope --out OUT :: nope :: choose from own
probe teacher --data images --init_head classes.txt --out OUT :: classes.txt :: give a file with weight
probe teacher --data images --train_images 0 --out OUT :: --train_images :: at least 1
probe teacher --data images --train_images 1 --out OUT :: got 1 :: at least two training images
probe teacher --data images --num_images 0 --out OUT :: --num_images :: at least 1
probe teacher --data images --budget soon --out OUT :: cannot read the budget
probe teacher --task depth --data images --out OUT :: 'images' :: give scenes, ade20k:PATH or nyuv2:PATH
probe teacher --task segment --data nope --out OUT :: 'nope' :: give a folder
probe teacher --task depth --data nyuv2:nope --out OUT :: nope :: check the path
probe teacher --task depth --data nyuv2: --out OUT :: 'nyuv2:' :: give scenes, ade20k:PATH or nyuv2:PATH
probe teacher --task segment --data ade20k:images --out OUT :: images :: expected ADEChallengeData2016
probe teacher --task depth --data nyuv2:images --out OUT :: images :: expected a .mat
probe teacher --task depth --data nyuv2:classes.txt --out OUT :: classes.txt :: make it again
probe teacher --task depth --data nyuv2:head.mat --out OUT :: head.mat :: give the path
probe teacher --task segment --closed_form ridge --data scenes --train_images 4 --out OUT :: closed_form :: classify
probe teacher --data images --batch_size 1000 --budget 1epochs --out OUT
probe teacher --data images --closed_form ridge --out OUT
probe teacher --data images --init_head head.safetensors --budget 1epochs --out OUT
probe teacher --data images --init_head named.safetensors --out OUT :: named.safetensors :: give another --init_head
probe teacher --data images --classes classes.txt --budget 1epochs --out OUT
"""

DYNAMICS = """
dynamics nope :: 'nope' :: write timm/NAME
dynamics teacher --data images --k 0 --out OUT :: --k :: at least 1
dynamics teacher --data images --k 99 --out OUT :: k=99 :: smaller --k
dynamics teacher --data images --phases 9 9 --out OUT :: [9, 9] :: change one
dynamics teacher --data images --sample_images 0 --out OUT :: --sample_images :: at least 1
dynamics teacher --data images --eps 0 --out OUT :: --eps :: more than 0
dynamics teacher --data images --eps -1 --out OUT :: --eps :: more than 0
dynamics teacher --data images --eps nan --out OUT :: --eps :: numbers
dynamics teacher --data images --perturbation nope --out OUT :: --perturbation :: one of relative
dynamics teacher --data images --seed -1 --out OUT :: --seed :: at least 0
dynamics teacher --data images --head_file classes.txt --out OUT :: classes.txt :: give a file with weight
dynamics teacher --data images --split nope --out OUT :: 'nope' :: use train, val, all
dynamics teacher --data images --out classes.txt :: classes.txt :: choose another --out
"""

OTHERS = """
report :: give RUN :: --help
report nope :: run folder nope :: give the --out
report --module mine.py:make_vit :: a run :: name its folder
report images :: images holds no results :: raptor phases
report classes.txt :: classes.txt is not a folder :: run folder
report run --num_images -1 :: --num_images :: at least 0
report run --num_images x :: --num_images :: whole number
report run --data nope :: 'nope' :: give a folder
report run --split nope :: 'nope' :: use train, val, all
report run --out /proc/x.html :: /proc :: choose another --out
report run --out images :: images is a folder :: images/report.html
report run --out classes.txt/page.html :: classes.txt :: choose another --out
report run --num_images 0 --out OUT.html
states teacher --data images --layers 9 --out OUT :: --layers :: from 0 to 4
states teacher --data images --layers -1 --out OUT :: --layers :: from 0 to 4
states teacher --data images --layers x --out OUT :: --layers :: whole numbers
states teacher --data images --num_images 0 --out OUT :: --num_images :: at least 1
states teacher --data images --split nope --out OUT :: 'nope' :: use train, val, all
states teacher --data images --batch_size 0 --out OUT :: --batch_size :: at least 1
states teacher --data images --pool maybe --out OUT :: --pool :: true or false
states teacher --data images --out classes.txt :: classes.txt :: choose another --out
states teacher --data nope --out OUT :: 'nope' :: give a folder
states teacher --data images --layers 0 4 --out 'OUT with spaces é'
states teacher --data images --out OUT/-dash
states teacher --data images --parts nope --out OUT :: --parts :: one of attn, attn_out
states teacher --data images --layers 0 --parts attn --out OUT :: --parts :: give other --layers
show :: give MODEL :: --help
show teacher :: give IMAGE :: --help
show teacher nope.png --out OUT :: nope.png :: check its path
show teacher classes.txt --out OUT :: classes.txt :: not an image
show nope flat/0.png --out OUT :: 'nope' :: write timm/NAME
show teacher flat/0.png --what nope --out OUT :: --what :: one of attention, pca
show teacher flat/0.png --layers 9 --out OUT :: --layers :: from 1 to
show teacher flat/0.png extra --out OUT :: unexpected extra :: --help
show teacher flat/0.png --what turn pca --layers 2 --out OUT
explore :: give MODEL :: --help
explore nope :: 'nope' :: write timm/NAME
explore teacher --port -1 :: --port :: at least 1
explore teacher --port 99999999 :: --port :: at most 65535
explore teacher --port x :: --port :: whole number
models nothinglikethis :: 'nothinglikethis' :: shorter part
models '[' :: '[' :: shorter part
models a b :: unexpected b :: --help
models scenes
demo --num_images 0 --out OUT :: --num_images :: at least 1

demo --out classes.txt :: classes.txt :: choose another --out
demo --device nope :: --device :: one of auto
demo one two :: unexpected two :: --help
nope :: 'nope' :: choose from demo
evalute run :: 'evalute' :: did you mean evaluate
completion :: which shell :: completion bash
completion fish :: which shell :: completion bash
completion bash
--version
--help
"""

TEACHER = """
train-teacher --data nope --out OUT :: 'nope' :: give a folder
train-teacher --data flat --out OUT :: flat has no labels :: one folder per class
train-teacher --shape resnet50 --data images --out OUT :: --shape resnet50 :: such as vit_tiny
train-teacher --shape vit_tinny_patch16_224 --data images :: --shape vit_tinny :: did you mean vit_tiny
train-teacher --shape vit_tinny --data images :: --shape vit_tinny :: did you mean vit_tiny_patch16_224
train-teacher --shape '' --data images :: --shape is empty :: leave it out
train-teacher --data images --size 0 --out OUT :: 0 px :: --size of 1..4096
train-teacher --data images --patch 0 --out OUT :: --patch :: at least 1
train-teacher --data images --batch_size 4 --size 24 --patch 7 --out OUT :: 24 px :: divisible by patch size
train-teacher --data images --dim 0 --out OUT :: --dim :: at least 1
train-teacher --data images --dim 100000000 --out OUT :: --dim :: at most 65536
train-teacher --data images --heads 0 --out OUT :: --heads :: at least 1
train-teacher --data images --size 24 --patch 8 --dim 32 --heads 5 --batch_size 4 --out OUT :: heads :: change its shape
train-teacher --data images --depth 0 --out OUT :: --depth :: at least 2
train-teacher --data images --depth 100000 --out OUT :: --depth :: at most 1024
train-teacher --data images --registers -1 --out OUT :: --registers :: at least 0
train-teacher --data images --drop 1 --out OUT :: drop probability :: in [0, 1)
train-teacher --data images --drop -1 --out OUT :: drop probability :: in [0, 1)
train-teacher --data images --budget 0 --out OUT :: '0' :: write 120s
train-teacher --data images --smoothing 2 --out OUT :: --smoothing :: less than 1
train-teacher --data images --smoothing -1 --out OUT :: --smoothing :: at least 0
train-teacher --data images --warmup 5 --out OUT :: --warmup :: less than 1
train-teacher --data images --mixup -1 --out OUT :: --mixup :: at least 0
train-teacher --data images --cutmix -1 --out OUT :: --cutmix :: at least 0
train-teacher --data images --lr 0 --out OUT :: --lr :: more than 0
train-teacher --data images --lr 1e999 --out OUT :: --lr :: a number
train-teacher --data images --weight_decay -1 --out OUT :: --weight_decay :: at least 0
train-teacher --data images --batch_size 4 --augment nope --out OUT :: --augment :: one of none
train-teacher --data images --batch_size 4 --crop_scale 0 1 --out OUT :: --crop_scale :: within 0..1
train-teacher --data images --crop_scale 1 --out OUT :: --crop_scale :: numbers
train-teacher --data images --batch_size 0 --out OUT :: --batch_size :: at least 1
train-teacher --data images --batch_size 1000 --out OUT :: batch of 1000 :: give --batch_size
train-teacher --data images --seed -1 --out OUT :: --seed :: at least 0
train-teacher --data images --batch_size 4 --out run :: run holds a run :: choose another --out
train-teacher --data images --batch_size 4 --out classes.txt :: classes.txt :: choose another --out
"""

REPRODUCE = """
"""


def read_table(text: str) -> list[Case]:
    rows = [[part.strip() for part in line.split("::")] for line in text.strip().splitlines()]
    return [Case(row[0], *row) for row in rows]


CASES = [
    case
    for table in (PHASES, DISTILL, EVALUATE, PROBE, DYNAMICS, OTHERS, TEACHER, REPRODUCE)
    for case in read_table(table)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_words(case: Case, world: Path, tmp_path: Path, capsys: Any) -> None:
    check(case, tmp_path / "out", capsys)


class Ascii(io.TextIOWrapper):
    """A stream of an ASCII terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["猫", "é", "a\udcffb", "\x1b[31m", "a\nb"])
def test_an_ascii_terminal(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its encoding lacks is escaped: neither a traceback nor silence."""
    out, err = Ascii(), Ascii()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert main(["phases", name]) == 2
    assert (
        err.text().startswith("raptor: MODEL: unknown model")
        and err.text().count("\n") == 1
        and "\x1b" not in err.text()
    )
    print(name)
    assert len(out.text()) >= len(name)
