"""Words for keys and lists: our own short lists of everyday words, and compounds of them where more are needed."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """able ample ancient amber awake azure bare basic bent big bitter blank blue bold brave bright brisk broad broken
    brown busy calm candid careful cheap chilly civil clean clear clever close cloudy coarse cold common cool copper
    costly crisp curly damp daring dark deep dense dim distant dizzy double dry dull dusty eager early easy elder empty
    even exact faint fair famous fancy fast fierce final fine firm flat fluent fond formal fragile frank free fresh
    frosty full gentle giant glad golden grand grateful gray great green hardy harsh hasty heavy hidden hollow honest
    huge humble hungry icy idle ivory jolly keen kind large late lavish lazy lean light little lively local lone long
    loose loud loyal lucky mellow mild minor modern modest muddy narrow neat new nimble noble noisy odd old open orange
    pale patient plain polite proud pure quick quiet rapid rare raw ready red remote rich ripe robust rough round royal
    rustic sacred salty sandy secret serene shallow sharp shiny short shy silent silver simple sleepy slow small smooth
    sober soft solid sour spare steady steep stern stiff still stout strange strict strong sturdy subtle sudden sunny
    sweet swift tall tame tart tender thick thin tidy tight timid tiny tough true urban usual vague vast vital vivid
    warm wary wet white whole wide wild windy wise witty wooden yellow young zesty"""
)

NOUNS = _words(
    """acorn anchor apple apron arrow attic badge bakery balcony ballad bamboo banner barley barn barrel basin basket
    beacon beaver bell bench berry blanket blossom boat bonnet bottle boulder branch brick bridge broom bucket buffalo
    button cabin cable camel camera canal candle canoe canvas canyon carpet cart castle cedar cellar chain chair chalk
    chapel cherry chimney cinema circus clock cloud clover coast cobbler coin comet compass copper coral corner cottage
    cotton cradle crane crater cricket crown crystal cup curtain daisy desert desk diamond dome donkey door dragon drum
    eagle echo elbow ember engine falcon farmer feather fence ferry fiddle field finch flame flute forest fossil
    fountain fox galaxy garden garlic gate ginger glacier glove goose grain granite grape guitar hammer harbor harp
    hazel hedge helmet hermit heron hill honey horizon hotel island ivy jacket jaguar jar jewel jungle kettle kitchen
    kite kitten ladder lagoon lake lamp lantern lemon library lily linen lion lizard lobster lotus magnet mango maple
    marble market meadow melon mill mint mirror monkey moon mosaic moss motor mountain mule museum nail napkin needle
    nest nettle noodle oak oasis oat ocean olive onion opera orchard organ otter owl oyster paddle palace panther paper
    parade parrot pasture path peach peacock pear pebble pencil penguin pepper piano pigeon pillow pilot pine planet
    plum pocket poem pond pony poplar potato prairie prism pumpkin puzzle quarry quartz rabbit raccoon radio raft
    rainbow raven reef ribbon river robin rocket rope rose saddle sail salmon sandal satin scarf school seal shadow
    shell shelter ship silk skylark sled snail sock spider spoon sparrow spruce stable statue stone storm stove summit
    swan table tailor temple tent theater thistle thunder tiger timber tower trail train tulip tunnel turtle umbrella
    valley vase velvet village violin volcano wagon walnut walrus water wheel whistle willow window winter wolf wren
    yarn zebra"""
)

VERBS = _words(
    """accept admire advise agree allow announce answer appear argue arrange arrive attend avoid bake balance begin
    behave belong bend blink borrow bounce bring build carry catch change chase choose climb collect compare complete
    consider continue cook count cover create dance decide declare defend deliver depend describe design develop
    discover discuss divide draw dream drift earn embrace encourage enjoy enter escape examine exist expand explain
    explore extend fasten fetch finish float follow forget forgive gather give glance glow grow guard guess guide hang
    happen help hesitate hope hurry imagine improve include inform inspect invent invite join jump knock laugh launch
    lead learn lend lift listen manage measure melt mend mention migrate move notice obey observe obtain offer
    organize paint perform persuade plant polish pour practice praise predict prepare present preserve prevent promise
    protect provide pull push quote reach read realize receive recite recover reduce refuse relax remain remember
    remind repair repeat replace reply report rescue respond return reveal reward ring roll rush scatter search seem
    send separate serve settle share shout sing sleep smile solve speak spell spin stand start stretch study suggest
    support surprise swim talk teach tell think thrive throw travel treat trust turn understand unite vanish visit wait
    walk wander warn wash watch weave welcome whisper win wonder work worry write yawn"""
)


def key(rng: random.Random) -> str:
    """An adjective and a noun, `quiet-lantern`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def word_list(count: int) -> tuple[str, ...]:
    """At least `count` different single words: the lists, and two nouns written together where they do not suffice.

    There are 90 thousand of them; fewer than `count` come back where more are asked for.
    """
    plain = tuple(sorted({*ADJECTIVES, *NOUNS, *VERBS}))
    if count <= len(plain):
        return plain
    compounds = sorted({first + second for first in NOUNS for second in NOUNS if first != second} - set(plain))
    return (*plain, *compounds)
