"""Look into pruned models.

python tools/analyze.py fidelity --model vit_small_patch14_dinov2 --img-size 224 --checkpoint FILE   training-free pruning, on sample photographs
python tools/analyze.py noop                                                                         patched with nothing to do equals timm
python tools/analyze.py kept --checkpoint DIR --images FILE [FILE ...] --output kept.png             which columns each block kept
python tools/analyze.py merged --model NAME --r 16 --images FILE [FILE ...] --output merged.png      which patches merged
python tools/analyze.py gates --run RUN --data-dir DIR --image FILE --output DIR                     budgets of gated heads, and what each head sees
python tools/analyze.py gates-text --run RUN --test-file FILE --text "a sentence" --output DIR       the same for text encoders
"""

from typing import Annotated

import tyro

from vit_prune.analysis.commands import Fidelity, Kept, Merged, Noop
from vit_prune.analysis.gates.command import Gates
from vit_prune.analysis.gates.texts import GatesText
from vit_prune.train.cli import main

Command = (
    Annotated[Fidelity, tyro.conf.subcommand("fidelity")]
    | Annotated[Noop, tyro.conf.subcommand("noop")]
    | Annotated[Kept, tyro.conf.subcommand("kept")]
    | Annotated[Merged, tyro.conf.subcommand("merged")]
    | Annotated[Gates, tyro.conf.subcommand("gates")]
    | Annotated[GatesText, tyro.conf.subcommand("gates-text")]
)

if __name__ == "__main__":
    main(lambda: tyro.cli(Command, description=__doc__).run())
