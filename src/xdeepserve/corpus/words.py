"""The words that the generators choose from. Few, and mostly single tokens of the trained tokenizer."""

SHE = (
    "Anna Bella Clara Daisy Emma Fiona Grace Hanna Ida Julia Kate Lily Mia Nora Olive Rosa Sara Tina Vera Zoe"
).split()
HE = (
    "Adam Ben Carl Dan Eric Finn George Henry Ivan Jack Karl Leo Max Nick Oscar Paul Robin Sam Tom Victor"
).split()
NAMES = sorted(SHE + HE)

ANIMALS = "fox bear rabbit mouse hen cat dog frog duck goat horse pig sheep tiger turtle wolf".split()
COLOURS = "red blue green yellow white black brown golden silver purple".split()
PLACES = "forest river hill garden lake village meadow farm harbour mountain".split()
THINGS = "ball lamp book cup drum kite key map ring box bell hat boat coin clock basket".split()
FOODS = "bread soup honey cheese cake jam rice corn fruit fish".split()
FRUITS = "apple pear plum nut lemon".split()  # these can be counted
NATURES = "small brave kind clever shy happy curious gentle lazy proud".split()
CITIES = (
    "Berlin Cairo Dublin Lima London Madrid Oslo Paris Prague Rome Tokyo Vienna Boston Delhi Geneva Lisbon"
).split()
SONGS = "Moonlight Summer Rain Morning Ocean Winter Sunrise Thunder".split()
WORDS = sorted(ANIMALS + THINGS + FRUITS + "stone tree star cloud snow fire wind sand leaf gold".split())
