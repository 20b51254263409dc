"""The grammar of the captions: many ways to tell one combination of attributes, and what each of them leaves out."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from tools.tiny.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, SPEEDS

UNKNOWN_WORD = "unheardof"
"""Stands in captions for words outside the vocabulary, so that the model learns to pass over them."""


def split_words(text: str) -> list[str]:
    """Words and runs of punctuation, as the tokenizer cuts them."""
    return re.findall(r"\w+|[^\w\s]+", text.lower())


# Where a word stands more than once in a list, it is that much more usual.
_NOUNS = {
    "circle": ["circle"] * 6 + ["ball", "disc", "disk", "dot"],
    "square": ["square"] * 6 + ["box", "block"],
    "triangle": ["triangle"] * 8 + ["pyramid"],
    "star": ["star"],
}
_COLOUR_WORDS = {
    "red": ["red"] * 8 + ["crimson", "scarlet"],
    "green": ["green"] * 8 + ["emerald"],
    "blue": ["blue"] * 8 + ["azure", "navy"],
    "yellow": ["yellow"] * 8 + ["golden"],
    "orange": ["orange"],
    "purple": ["purple"] * 5 + ["violet"],
    "white": ["white"],
    "black": ["black"],
    "gray": ["gray", "gray", "grey"],
}
_SIZE_WORDS = {
    "small": ["small", "small", "little", "tiny"],
    "medium": ["medium", "medium sized"],
    "large": ["large", "large", "big", "big", "huge", "giant"],
}
_SPEED_WORDS = {"slow": ["slowly", "slowly", "gently"], "fast": ["fast", "quickly", "rapidly"]}
_DIRECTIONS = {
    "right": ["right", "right", "right", "to the right", "rightward", "rightwards", "from left to right"],
    "left": ["left", "left", "left", "to the left", "leftward", "leftwards", "from right to left"],
    "up": ["up", "up", "up", "upward", "upwards", "to the top", "from bottom to top"],
    "down": ["down", "down", "down", "downward", "downwards", "to the bottom", "from top to bottom"],
}
# (doing, does)
_GOING = [("moving", "moves")] * 5 + [
    ("going", "goes"),
    ("sliding", "slides"),
    ("drifting", "drifts"),
    ("gliding", "glides"),
    ("floating", "floats"),
    ("traveling", "travels"),
    ("travelling", "travels"),
    ("flying", "flies"),
    ("moving", "is moving"),
]
_DEEDS = {
    "up": [("rising", "rises"), ("ascending", "ascends"), ("climbing", "climbs")],
    "down": [("falling", "falls"), ("dropping", "drops"), ("descending", "descends"), ("sinking", "sinks")],
    "still": [
        ("standing still", "stands still"),
        ("standing still", "is standing still"),
        ("staying still", "stays still"),
        ("not moving", "does not move"),
        ("not moving", "is not moving"),
        ("staying in place", "stays in place"),
        ("motionless", "is motionless"),
        ("static", "is static"),
        ("still", "is still"),
        ("at rest", "is at rest"),
    ],
    "growing": [
        ("growing", "grows"),
        ("growing", "is growing"),
        ("expanding", "expands"),
        ("getting bigger", "gets bigger"),
        ("getting larger", "gets larger"),
        ("becoming larger", "becomes larger"),
    ],
    "shrinking": [
        ("shrinking", "shrinks"),
        ("shrinking", "is shrinking"),
        ("contracting", "contracts"),
        ("getting smaller", "gets smaller"),
        ("becoming smaller", "becomes smaller"),
    ],
    "rotating": [
        ("rotating", "rotates"),
        ("rotating", "is rotating"),
        ("spinning", "spins"),
        ("spinning", "is spinning"),
        ("turning", "turns"),
        ("turning around", "turns around"),
    ],
}
_PLACES = [
    *["on {a_bg} background"] * 6,
    "on {bg}",
    "on {bg} background",
    "on {a_bg} backdrop",
    "on {a_bg} screen",
    "over {a_bg} background",
    "against {a_bg} background",
    "with {a_bg} background",
    "in front of {a_bg} background",
]
_MOVING_PLACED = [
    *["{subject} {doing} {place}"] * 10,
    *["{subject} {does} {place}"] * 3,
    *["{subject} {doing}, {bg} background"] * 2,
    "{place}, {subject} {does}",
    "{subject} {place} {doing}",
    "{subject} {place}, {doing}",
    "{a_bg} background with {subject} {doing}",
    "{bg} background, {thing}, {doing}",
    "the background is {bg}, {subject} {does}",
]
_COPULA = "the {noun} is {colour}, the background is {bg}, it {does}"
_MOVING = ["{subject} {doing}", "{subject} {doing}", "{subject} {does}"]
_PLACED = ["{subject} {place}", "{subject} {place}", "{subject} {place}", "{bg} background, {thing}"]
_ANNOUNCED = {
    True: ["an image of", "a picture of", "a photo of", "image of", "a drawing of"],
    False: ["a video of", "a clip of", "an animation of", "video of", "a short video of", "footage of"],
}
_PRAISE = ["high quality", "best quality", "cinematic", "4k", "simple flat style", "smooth motion", "highly detailed"]
_BLAME = split_words(
    "blurry blurred low worst quality jpeg artifacts distorted deformed ugly bad overexposed watermark text subtitles "
    "noisy static still dull messy details"
)
_OFTEN_TYPED = split_words(
    "shape colored coloured bright dark light solid plain simple one single object scene shows there that which and "
    "are while then center centre middle corner side frame this please create generate make show draw me i want by "
    "very across through toward towards"
)


@dataclass(frozen=True)
class Caption:
    text: str
    said: tuple[bool, bool, bool, bool, bool, bool]
    """Whether the text tells each of the world's FIELDS."""


def _with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _deed(rng: random.Random, motion: str, speed: str) -> tuple[str, str, bool]:
    """(doing, does, whether the speed is told)."""
    if motion not in _DIRECTIONS:
        return *rng.choice(_DEEDS[motion]), False
    adverb = rng.choice(_SPEED_WORDS[speed]) if speed in _SPEED_WORDS and rng.random() < 0.5 else ""
    if motion in _DEEDS and rng.random() < 0.25:
        doing, does = rng.choice(_DEEDS[motion])
    else:
        direction = rng.choice(_DIRECTIONS[motion])
        doing, does = (f"{verb} {direction}" for verb in rng.choice(_GOING))
    if adverb and adverb != "fast" and not does.startswith("is ") and rng.random() < 0.5:
        return f"{adverb} {doing}", f"{adverb} {does}", True
    return f"{doing} {adverb}".strip(), f"{does} {adverb}".strip(), bool(adverb)


def write(rng: random.Random, row: tuple[int, ...], *, image: bool = False, complete: bool = False) -> Caption:
    """A caption of the combination `row`. `complete` ones tell shape, both colours and motion, with nothing beside."""
    shape, colour, background = SHAPES[row[0]], COLOURS[row[1]], BACKGROUNDS[row[2]]
    motion, size, speed = MOTIONS[row[3]], SIZES[row[4]], SPEEDS[row[5]]
    has_colour = complete or rng.random() < 0.93
    has_background = complete or rng.random() < 0.88
    has_motion = complete or rng.random() < (0.5 if image else 0.9)
    has_size = motion not in ("growing", "shrinking") and rng.random() < 0.45
    doing, does, has_speed = _deed(rng, motion, speed)
    noun, colour_word = rng.choice(_NOUNS[shape]), rng.choice(_COLOUR_WORDS[colour])
    words = [rng.choice(_SIZE_WORDS[size])] * has_size + [colour_word] * has_colour + [noun]
    thing = " ".join(words)
    subject = rng.choice([thing, f"the {thing}", *[_with_article(thing)] * 8])
    bg = rng.choice(_COLOUR_WORDS[background])
    a_bg = _with_article(bg)
    place = rng.choice(_PLACES).format(bg=bg, a_bg=a_bg)

    match has_motion, has_background:
        case True, True:
            copula = [_COPULA] if has_colour and not has_size else []
            patterns = _MOVING_PLACED + copula
        case True, False:
            patterns = _MOVING
        case False, True:
            patterns = _PLACED
        case _:
            patterns = ["{subject}"]
    text = rng.choice(patterns).format(
        subject=subject,
        thing=thing,
        noun=noun,
        colour=colour_word,
        bg=bg,
        a_bg=a_bg,
        place=place,
        doing=doing,
        does=does,
    )
    if rng.random() < 0.15:
        text = f"{rng.choice(_ANNOUNCED[image])} {text}"
    if not complete:
        text = _cluttered(rng, text)
    return Caption(text, (True, has_colour, has_background, has_motion, has_size, has_speed and has_motion))


def _cluttered(rng: random.Random, text: str) -> str:
    """Adds, now and then, what must do no harm: praise, words the model does not know, a full stop."""
    if rng.random() < 0.10:
        text += f", {rng.choice(_PRAISE)}"
    if rng.random() < 0.08:
        words = text.split()
        for _ in range(rng.randint(1, 2)):
            words.insert(rng.randint(0, len(words)), UNKNOWN_WORD)
        text = " ".join(words)
    return text + "." if rng.random() < 0.10 else text


def complaint(rng: random.Random) -> str:
    """A negative prompt as users write them. Training takes it for no caption, so that it acts like an empty one."""
    return " ".join(rng.choice([*_BLAME, *[",", UNKNOWN_WORD] * 8]) for _ in range(rng.randint(1, 14)))


def vocabulary() -> list[str]:
    """Every word that a caption can hold, sorted."""
    return sorted({word for phrase in _phrases() for word in split_words(re.sub(r"\{\w+\}", " ", phrase))})


def _phrases() -> Iterator[str]:
    for table in (_NOUNS, _COLOUR_WORDS, _SIZE_WORDS, _SPEED_WORDS, _DIRECTIONS, _ANNOUNCED):
        yield from chain.from_iterable(table.values())
    yield from chain.from_iterable(chain(_GOING, *_DEEDS.values()))
    yield from chain(_PLACES, _MOVING_PLACED, _MOVING, _PLACED, _PRAISE, _BLAME, _OFTEN_TYPED)
    yield from (_COPULA, "a an the of in with , .")
