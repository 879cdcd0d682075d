"""What tools/close_the_loop.py trains of each family: a small model from scratch, and its speed switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FamilyRecipe:
    """What differs between the families.

    tokenizer: its file, how it is made, and the package that reads it. model: flags of the small model. horizon: flags that get
    the number of actions. all_switches, no_switches: flags of training with every speed switch on, and off.
    """

    image_size: int
    tokenizer: str
    tokenizer_package: str
    tokenizer_flags: tuple[str, ...] = ()
    model: tuple[str, ...]
    horizon: tuple[str, ...]
    all_switches: tuple[str, ...]
    no_switches: tuple[str, ...]


FAST = ("--compile", "--merge-projections", "--unmasked-attention", "flash", "--runner", "full_iteration_graph", "--allow-tf32")
RECIPES = {
    "pi05": FamilyRecipe(
        image_size=112,
        tokenizer="tokenizer.model",
        tokenizer_package="sentencepiece",
        # Four draws of noise a sample cost 7 % more arithmetic, in the action expert.
        model=("--max-prompt-length", "48", "--flow-draws", "4"),
        horizon=("--action-horizon",),
        all_switches=("--attention-backend", "matmul", *FAST),
        no_switches=("--attention-backend", "eager", "--no-fused-adam", "--no-fused-kernels", "--no-skip-dead-compute"),
    ),
    "groot_n1_7": FamilyRecipe(
        image_size=128,
        tokenizer="tokenizer.json",
        tokenizer_package="tokenizers",
        tokenizer_flags=("--kind", "byte_pair"),
        model=(
            # The backbone starts from nothing, so all of it is trained, and a dropout made for many epochs is left out.
            *("--tune-llm", "--tune-visual", "--dropout", "0", "--state-dropout-prob", "0"),
            # A token for every 16 x 16 pixels, as in the other family: with the released 32 x 32 the small objects of the tasks
            # share a token with their surroundings. Nothing of the picture is cropped.
            *("--vision-spatial-merge-size", "1", "--vision-num-position-embeddings", "64", "--image-crop-fraction", "1"),
            # One width for all: one graph in training, and one batch for all tasks in the evaluation.
            *("--max-prompt-length", "224", "--prompt-padding", "max", "--mask-vl-self-attention"),
            *("--image-token", "5", "--padding-token", "0", "--embodiment-id", "0"),
        ),
        horizon=("--action-horizon", "--action-steps"),
        all_switches=FAST,
        no_switches=("--attention-backend", "eager", "--no-fused-adam", "--no-fused-kernels"),
    ),
}
