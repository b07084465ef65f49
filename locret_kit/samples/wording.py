"""The wording of synthetic samples: the words that values and facts are made of, sentences to hide facts in, and prompts to
ask with ({c} is the text, {q} the question).

What begins with HELD is for validation alone: it shares no 13 words in a row with what is trained on.
"""

from __future__ import annotations

NAMES = [
    "Anna", "Weber", "Tomas", "Priya", "Mei", "Oluwaseun", "Clara", "Dmitri", "Fatima", "Hugo", "Ingrid", "Jamal",
    "Keiko", "Liam", "Marta", "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Samir", "Tara", "Ulrich", "Vera",
    "Wendell", "Ximena", "Yusuf", "Zoe", "Albert", "Beatrice",
]  # fmt: skip
THINGS = [
    "bicycle", "suitcase", "umbrella", "lantern", "teapot", "piano", "notebook", "kayak", "violin", "ladder", "clock",
    "blanket", "mailbox", "scarf", "telescope", "drawer", "helmet", "curtain", "bench", "tractor", "vase", "wallet",
    "kettle", "jacket",
]  # fmt: skip
PLACES = [
    "the old harbour", "the north gate", "the botanical garden", "the railway museum", "the bakery on Mill Street",
    "the third floor lobby", "the lighthouse", "the university library", "the town hall steps", "the ferry terminal",
    "the rooftop cafe", "the stone bridge", "the observatory", "the flower market", "Platform 9", "the hotel bar",
]  # fmt: skip
PROJECTS = [
    "Falcon", "Aurora", "Granite", "Lotus", "Meridian", "Orchid", "Pelican", "Saturn", "Tundra", "Velvet", "Walnut",
    "Zephyr", "Cobalt",
]  # fmt: skip
COLOURS = [
    "red", "blue", "green", "yellow", "purple", "orange", "black", "white", "turquoise", "crimson", "silver", "brown",
    "pink", "olive",
]  # fmt: skip
JOBS = [
    "carpenter", "surgeon", "baker", "pilot", "librarian", "plumber", "violinist", "judge", "gardener", "chemist",
    "welder", "translator", "dentist", "geologist", "tailor", "beekeeper",
]  # fmt: skip
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
WORDS = [
    "amber", "anchor", "basil", "canyon", "cedar", "cinder", "comet", "copper", "coral", "delta", "ember", "falcon",
    "fern", "flint", "harbor", "hazel", "indigo", "ivory", "jasper", "lagoon", "lilac", "maple", "marble", "meadow",
    "nectar", "onyx", "opal", "pepper", "pine", "quartz", "raven", "river", "saffron", "sage", "sierra", "slate",
    "spruce", "thistle", "timber", "topaz", "velvet", "violet", "willow", "winter",
]  # fmt: skip
QUOTES = [
    "the kettle always whistles twice", "never trust a quiet printer", "bring the blue folder on Monday",
    "the owls know where the road ends", "a good map forgets nothing", "we leave before the second bell",
    "salt first, then the lemons", "keep the small key under the fern", "rain is only late sunshine",
    "the tallest ladder has no shadow", "count the windows, not the doors", "tomorrow the bridge will open",
]  # fmt: skip

HELD_QUOTES = [
    "a wet umbrella forgives nobody", "the third step always creaks", "never lend a spoon to a sailor",
    "half of the orchard belongs to the wasps", "the post comes late on purpose", "good soup needs a patient cook",
]  # fmt: skip

SENTENCES = (
    "The river runs past the mill.",
    "It is cold today.",
    "Birds sing.",
    "A cart rolls by.",
    "The door is open.",
    "Nobody said a word about the weather.",
    "Snow falls on the quiet hills.",
    "One more time.",
    "The bread is warm.",
    "Leaves turn brown and drop to the ground one after another.",
    "Up and down.",
    "The road goes on.",
    "We wait.",
    "A dog sleeps in the shade of the old wall.",
    "The moon is round.",
    "Waves come in and waves go out.",
    "And again.",
    "Trees are tall.",
    "There is nothing to see here.",
    "The bell rings at noon.",
    "The fields are wide and empty.",
    "Someone left the light on in the hall.",
    "Clouds drift over the valley.",
    "Time passes slowly.",
    "The tea is hot.",
    "This line says nothing of interest.",
    "The cat sits on the fence and looks at the street.",
    "Round it goes.",
    "A boat is on the lake.",
    "Stones are hard.",
    "The sand is white and the sea is grey.",
    "Left, then right.",
    "Wind moves the grass.",
    "The fire burns low.",
    "Every day is much like the day before it.",
    "Back to the start.",
)
HELD_SENTENCES = (
    "The corridor is long.",
    "A kettle hums on the stove.",
    "Rain taps at the window and stops.",
    "Somebody hums a tune.",
    "The ferry comes and the ferry goes.",
    "Dust lies on the shelf.",
    "Once again nothing came with the post.",
    "The lamp is dim.",
    "Sheep stand in the meadow and look at the gate.",
    "Then it begins anew.",
)

_INFO = "There is an important info hidden inside a lot of irrelevant text."
PROMPTS = (
    _INFO + " Find it and memorize it. I will quiz you about it.\n\n{c}\n\n{q}",
    "Some facts are hidden in the following text. Remember them.\n\n{c}\n\n{q}",
    "Read the text and answer the question.\n\n{c}\n\nQuestion: {q}",
    "Read the text and answer the question. Be very concise.\n\n{c}\n\nQuestion: {q}\nAnswer:",
    "{c}\n\n{q}",
    "{c}\n\nQuestion: {q}",
    "{c}\n\nBased on the text above: {q}",
    "{c}\n\n---\n\n{q}",
    "Text:\n{c}\n\nTask: {q}",
    "### Document\n{c}\n\n### Question\n{q}",
    "<document>\n{c}\n</document>\n\n{q}",
    "Here is a long document.\n\n{c}\n\nAccording to the document: {q}",
    "{c}\n\nNow tell me: {q}",
    "Below are my notes. I will ask about them later.\n\n{c}\n\nMy question: {q}",
    "Some special information is hidden within the following text. Make sure to memorize it.\n{c}\n{q}",
    "Context:\n{c}\n\nAnswer with the help of the context only. {q}",
    "Study this.\n\n{c}\n\nEnd of the text. {q}",
    "I lost a detail in this text, please help me to find it.\n\n{c}\n\n{q}",
    "```\n{c}\n```\n{q}",
    "You are given a long text.\n\n{c}\n\nWithout explaining anything: {q}",
    "{c}\n\n{q} Answer briefly.",
    "Pay attention to unusual sentences.\n\n{c}\n\n{q}",
    "Article:\n\n{c}\n\nReader's question: {q}",
    # the question before the text too
    "{q}\n\n{c}\n\n{q}",
    "Find out: {q}\n\n{c}\n\nOnce more, the question: {q}",
    "You will be asked this: {q}\n\n{c}\n\n{q}",
    "Question: {q}\n\nText: {c}\n\nQuestion: {q}",
    "Read the text with this question in mind. {q}\n\n{c}\n\nNow answer. {q}",
)
HELD_PROMPTS = (
    "Go through these pages with care, since a question comes at the end.\n\n{c}\n\nHere it is: {q}",
    "{c}\n\nWhat the pages above say is enough to answer. {q}",
    "The archive holds these lines:\n{c}\n\nA visitor asks: {q}",
    "=== BEGIN ===\n{c}\n=== END ===\n{q}",
    "{c}\n\n\n{q}\nAnswer:",
    "Keep this at hand: {q}\n\n{c}\n\nSo, what is it? {q}",
)
