"""English words for keys and word lists, the same everywhere: chosen for this project, short and common."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    able acid aged airy amber ample angry arid awake bare basic bitter black bland blank bleak blind blue blunt
    bold brave brief bright brisk broad broken brown busy calm careful cheap cheerful chilly civil clean clear
    clever close cloudy clumsy coarse cold cool copper cosy crisp crooked cruel curly curved damp dark dear deep
    dense dim dirty distant dizzy double dry dull dusty eager early easy elder empty equal even evil exact faint
    fair fancy fast fatal feeble fierce final fine firm flat foggy fond formal fragile frank free fresh frosty
    full funny gentle giant glad golden grand grave great green grey grim guilty handy happy hard harsh hasty
    heavy hidden high hollow honest huge humble hungry icy ideal idle jolly keen kind large late lazy lean light
    little lively local lonely long loose loud loyal lucky mad major mellow merry mild minor modern modest moist
    narrow neat new nimble noble noisy odd old open orange pale patient plain pleasant polite poor prime private
    proud public purple quick quiet rapid rare raw ready red remote rich ripe robust rough round royal rude rural
    rusty sad safe salty secret sharp short shy silent silver simple sleepy slim slow small smart smooth sober
    soft solid sour spare spicy square stale steady steep stiff still stout strange strict strong sudden sunny
    sweet swift tall tame tart tender tense thick thin tidy tight timid tiny tired tough true urban useful usual
    vague vain vast vivid warm weak wealthy weary wet white wide wild wise witty wooden young
    """
)
NOUNS = _words(
    """
    acorn actor album alley anchor angle apple apron arch arrow atlas autumn axle badge bakery ball bamboo banana
    banner barn barrel basin basket beach beacon bean beard beaver bell belt bench berry bicycle blanket blossom
    boat bolt bonnet book boot bottle boulder bowl branch brass bread brick bridge broom brother brush bucket
    buckle button cabin cable cactus camel camera canal candle canoe canvas captain carpet carrot castle cattle
    cavern cedar cellar chain chair chalk chapel cherry chest chimney circle clay cliff clock cloud clover coast
    coat cobbler coin collar comet compass coral cork corner cottage cotton cousin cradle crane crayon creek
    cricket crown crystal cup curtain cushion dagger daisy dancer desert desk diamond diary dinner doctor dolphin
    donkey door dragon drawer dream drum eagle earring easel echo elbow elm engine envelope falcon farmer feather
    fence fern ferry fiddle field finger flag flame flute forest fork fossil fountain fox frame fridge frog
    furnace galaxy garden garlic gate ginger glacier glove goat gold goose grape gravel guitar hammer hammock
    harbour harp harvest hat hazel heart hedge helmet hill hinge honey horn horse hotel hour house iceberg inkwell
    iron island ivory jacket jar jewel journal judge jungle kettle key kitchen kite kitten knot ladder lagoon lake
    lamp lantern lawyer leaf ledger lemon lens letter library lily linen lion lizard locket log lotus magnet
    mantle maple marble market marsh mask meadow medal melon mill mirror mitten monkey moon morning mosaic moth
    mountain mouse museum mushroom music napkin neck needle nephew nest nettle night north notebook nutmeg oak oar
    ocean olive onion orchard organ otter oven owl oyster paddle page paint palace panda paper parcel park parrot
    passage peach pearl pebble pencil pepper piano picture pigeon pillar pillow pilot pine pipe planet plate
    plough plum pocket poem pond poppy porch potato pottery prince puddle pulley pumpkin puppet quarry queen quilt
    rabbit radio raft rain ranch raven razor ribbon rice ring river road robin rocket roof rope rose rudder ruler
    saddle sailor salad salmon sand scarf school season shadow sheep shell ship shoe shoulder shovel sister sled
    sleeve smoke snail snow soap soldier song soup south spade sparrow spider spoon spring squirrel stable stair
    star statue steam stone storm stove straw stream summer sun swallow swan table tailor teacher temple tent
    theatre thimble thistle thread throne thumb thunder tiger timber toast tomato tool torch tower town train tray
    treasure tree trumpet tulip tunnel turtle umbrella uncle valley vase velvet village vine violin wagon wall
    walnut water wave weasel wedding west whale wheat wheel whistle willow window winter wolf wool worm yard yarn
    zebra
    """
)
VERBS = _words(
    """
    accept admire agree allow announce appear argue arrange arrive attend bake balance bathe become begin believe
    belong borrow bounce breathe bring build carry catch cease chase choose climb collect compare complain confess
    connect consider copy count create cross decide deliver deny depend describe deserve divide doubt drift earn
    embrace encourage endure enjoy escape examine expand explain explore fetch finish follow forget forgive gather
    grasp greet guess happen hesitate hurry imagine improve include inform invite join juggle kneel laugh learn
    listen manage measure mention migrate nourish obey observe obtain occur offer perform permit persuade ponder
    prefer prepare pretend prevent produce promise protect provide publish punish purchase pursue receive recover
    reflect refuse relax remain remember remind remove repair repeat replace reply rescue resist respond return
    reveal ripen scatter search seem settle shiver shout solve speak squeeze stretch struggle succeed suggest
    supply suppose surprise surround survive teach tempt think tremble trust understand unite vanish wander watch
    whisper wonder worry write
    """
)


def singles() -> list[str]:
    """All words, each once, in a fixed order."""
    return list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))


def distinct(rng: random.Random, n: int) -> list[str]:
    """``n`` different words in random order; where there are not enough, words run together ("rivergate").

    Raises:
        ValueError: more words are asked for than pairs of nouns give.
    """
    words = singles()
    if n <= len(words):
        return rng.sample(words, n)
    known = set(words)
    pairs = [pair for a in NOUNS for b in NOUNS if (pair := a + b) not in known]
    if n - len(words) > len(set(pairs)):
        raise ValueError(f"n={n} must be at most {len(words) + len(set(pairs))} different words")
    chosen = words + rng.sample(sorted(set(pairs)), n - len(words))
    rng.shuffle(chosen)
    return chosen
