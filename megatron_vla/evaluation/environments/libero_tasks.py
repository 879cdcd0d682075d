"""LIBERO's benchmark as published (arXiv:2306.03310): suites, tasks in their official order, and the protocol of evaluation.

Protocol (that of OpenVLA and openpi, which published numbers follow): trial k of a task starts in official initial state k, ten
do-nothing steps let the objects settle, pictures are turned by 180 degrees, and a trial fails after a number of steps that is
somewhat longer than the longest human demonstration of the suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CONTROL_HZ = 20
NUM_INITIAL_STATES = 50
WAIT_STEPS = 10
# Six zeros and an open gripper.
WAIT_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
MAX_STEPS: Mapping[str, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
}

SPATIAL_PLACES = (
    "between_the_plate_and_the_ramekin",
    "next_to_the_ramekin",
    "from_table_center",
    "on_the_cookie_box",
    "in_the_top_drawer_of_the_wooden_cabinet",
    "on_the_ramekin",
    "next_to_the_cookie_box",
    "on_the_stove",
    "next_to_the_plate",
    "on_the_wooden_cabinet",
)
OBJECTS = (
    "alphabet_soup",
    "cream_cheese",
    "salad_dressing",
    "bbq_sauce",
    "ketchup",
    "tomato_sauce",
    "butter",
    "milk",
    "chocolate_pudding",
    "orange_juice",
)
SUITES: Mapping[str, tuple[str, ...]] = {
    "libero_spatial": tuple(f"pick_up_the_black_bowl_{place}_and_place_it_on_the_plate" for place in SPATIAL_PLACES),
    "libero_object": tuple(f"pick_up_the_{name}_and_place_it_in_the_basket" for name in OBJECTS),
    "libero_goal": (
        "open_the_middle_drawer_of_the_cabinet",
        "put_the_bowl_on_the_stove",
        "put_the_wine_bottle_on_top_of_the_cabinet",
        "open_the_top_drawer_and_put_the_bowl_inside",
        "put_the_bowl_on_top_of_the_cabinet",
        "push_the_plate_to_the_front_of_the_stove",
        "put_the_cream_cheese_in_the_bowl",
        "turn_on_the_stove",
        "put_the_bowl_on_the_plate",
        "put_the_wine_bottle_on_the_rack",
    ),
    "libero_10": (
        "LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket",
        "LIVING_ROOM_SCENE2_put_both_the_cream_cheese_box_and_the_butter_in_the_basket",
        "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it",
        "KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet_and_close_it",
        "LIVING_ROOM_SCENE5_put_the_white_mug_on_the_left_plate_and_put_the_yellow_and_white_mug_on_the_right_plate",
        "STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_back_compartment_of_the_caddy",
        "LIVING_ROOM_SCENE6_put_the_white_mug_on_the_plate_and_put_the_chocolate_pudding_to_the_right_of_the_plate",
        "LIVING_ROOM_SCENE1_put_both_the_alphabet_soup_and_the_cream_cheese_box_in_the_basket",
        "KITCHEN_SCENE8_put_both_moka_pots_on_the_stove",
        "KITCHEN_SCENE6_put_the_yellow_and_white_mug_in_the_microwave_and_close_it",
    ),
}
EXPERT_SUITES = ("libero_spatial", "libero_object")


def instruction_of(task: str) -> str:
    """`KITCHEN_SCENE3_turn_on_the_stove` -> `turn on the stove`: the benchmark's own rule."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", task).replace("_", " ")


def full_names(suite: str, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Tasks given by their name, or by their number in the suite (`3`), as names."""
    known = SUITES[suite]
    return tuple(known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in chosen)
