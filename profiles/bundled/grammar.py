"""Filler prose: sentences about a dozen topics from a small grammar, and the word lists that tasks share."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PUNCTUATION = (".", ",", "?", ":")
NUMBERS = tuple(str(n) for n in range(10, 100))

ADJECTIVES = _words(
    """
    amber ancient arctic azure bitter bold brass brave bright broken bronze calm clever cobalt copper coral
    crimson crystal dusty eager early elder emerald faded fierce gentle ghostly gilded golden grand hidden
    hollow humble icy indigo iron ivory jade lonely lunar magenta marble mellow misty noble olive pale patient
    plain proud purple quiet rapid restless rustic sandy scarlet secret silent silver solar stormy velvet violet
    wandering
    """
)
NOUNS = _words(
    """
    acorn anchor anvil arrow badger banner beacon bison candle canyon castle cedar cherry cobra comet condor
    coyote cricket dagger dolphin dragon ember falcon feather fern fox galaxy gazelle glacier hammer harp hawk
    heron jaguar kettle lantern lark lily lion lynx magnet maple meadow mirror monkey nectar needle orchid otter
    owl panther parrot pebble pelican piano pillar pirate rabbit raven rocket saddle salmon spider tiger
    """
)
PLACES = _words(
    """
    accra adana ankara athens austin bagan baku basel beirut bergen berlin bern bilbao bogota bonn boston braga
    bremen brno cairo cali caracas chennai cork cusco dakar dallas delhi denver dhaka doha dover dublin durban
    essen fargo fez galway geneva genoa ghent goa graz hanoi havana hobart izmir jaffa jena kabul kyoto lagos
    leeds leon lima lisbon london luanda lyon madrid malaga malmo manila medina memphis miami milan minsk mumbai
    munich nairobi nantes naples odessa omaha osaka oslo oxford paris perth porto prague quito reno riga rome
    seoul siena sofia tampa tokyo turin vienna zagreb zurich
    """
)
MONTHS = _words(
    """
    january february march april may june july august september october november december
    """
)

# topic: (people, things, verbs, qualities); a sentence keeps to one topic, so its words predict one another.
TOPICS = {
    "harbour": (
        "sailors captains divers pilots",
        "boats nets sails ropes docks waves",
        "moored repaired painted inspected",
        "wet wooden heavy drifting",
    ),
    "farm": (
        "farmers shepherds growers herders",
        "barns cows fields ploughs fences crops",
        "watered harvested mended fed",
        "green muddy fertile dry",
    ),
    "library": (
        "readers librarians scholars editors",
        "books shelves maps letters pages poems",
        "copied sorted borrowed translated",
        "rare printed thin leather",
    ),
    "market": (
        "traders buyers bakers butchers",
        "stalls baskets spices coins loaves fish",
        "sold weighed wrapped priced",
        "fresh cheap salted sweet",
    ),
    "railway": (
        "drivers guards porters engineers",
        "trains rails wagons tickets signals tunnels",
        "delayed loaded coupled tested",
        "late crowded slow steam",
    ),
    "garden": (
        "gardeners botanists neighbours visitors",
        "roses seeds hedges ponds paths bulbs",
        "planted trimmed picked admired",
        "shaded blooming tidy wild",
    ),
    "hospital": (
        "doctors nurses patients surgeons",
        "beds wards bandages masks charts needles",
        "cleaned treated ordered checked",
        "sterile private spare modern",
    ),
    "school": (
        "teachers pupils students tutors",
        "lessons desks exams essays classes songs",
        "graded finished practised taught",
        "short difficult final weekly",
    ),
    "kitchen": (
        "cooks waiters chefs guests",
        "soups plates ovens knives pies sauces",
        "served tasted washed warmed",
        "hot spicy burnt creamy",
    ),
    "mountain": (
        "climbers guides hikers rangers",
        "peaks tents trails cliffs ropes huts",
        "climbed mapped crossed photographed",
        "steep snowy rocky narrow",
    ),
    "workshop": (
        "carpenters smiths masons apprentices",
        "tools benches wheels hinges chairs nails",
        "carved polished measured welded",
        "rough oiled sturdy sharp",
    ),
    "theatre": (
        "actors singers dancers critics",
        "plays costumes curtains scripts stages drums",
        "rehearsed praised sewed performed",
        "loud comic famous old",
    ),
}

_TOPIC_WORDS = tuple(tuple(tuple(words.split()) for words in lists) for lists in TOPICS.values())

# P people, T things, V verb, Q quality, L place, N number, M month, A key adjective, K key noun
_TEMPLATES = tuple(
    template.split()
    for template in (
        "the P V the Q T .",
        "the P V the T near L .",
        "in M the P V N T .",
        "many P from L V the Q T in M .",
        "the Q T were V by the P , who then V the T .",
        "near L the P V the T , but the T were Q .",
        "about N P came to L in M .",
        "the P said that the T were Q .",
        "after N days the P V the T again .",
        "some P saw a A K near the T .",
        "there were N Q T in L .",
        "because the T were Q , the P V the T .",
    )
)
_SLOTS = {"P": 0, "T": 1, "V": 2, "Q": 3}
_SHARED = {"L": PLACES, "N": NUMBERS, "M": MONTHS, "A": ADJECTIVES, "K": NOUNS}


def filler_sentence(rng: random.Random, topic: int | None = None) -> list[str]:
    """Words of one sentence, its final period included, about ``topic`` (an index into TOPICS; any by default)."""
    draw = rng.random
    lists = _TOPIC_WORDS[int(draw() * len(_TOPIC_WORDS)) if topic is None else topic]
    words = []
    for word in _TEMPLATES[int(draw() * len(_TEMPLATES))]:
        if word in _SLOTS:
            pool = lists[_SLOTS[word]]
            words.append(pool[int(draw() * len(pool))])
        elif word in _SHARED:
            pool = _SHARED[word]
            words.append(pool[int(draw() * len(pool))])
        else:
            words.append(word)
    return words


def filler_words() -> set[str]:
    """Every word that ``filler_sentence`` can produce."""
    words = {word for template in _TEMPLATES for word in template} - set(_SLOTS) - set(_SHARED)
    for lists in _TOPIC_WORDS:
        words.update(word for group in lists for word in group)
    for pool in _SHARED.values():
        words.update(pool)
    return words
