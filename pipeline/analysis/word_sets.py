"""Word sets and word pairs for the intrinsic checks, for text and for code.

Members are written without white space. Members with letters or digits have no other signs at their ends.
`pipeline.analysis.word_sets.extract_word` reduces a chunk to the same form, so that `self.`, `self, ` and `self` are one
word.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WordSet:
    """Words that should be neighbours of each other, or pairs whose halves should be.

    Attributes:
        name: its name.
        of: the kind of corpus that has such words.
        members: words, as tuples of one, or pairs of words.
        spelled: whether the halves of a pair also look alike, so that spelling alone finds them.
    """

    name: str
    of: Literal["text", "code"]
    members: tuple[tuple[str, ...], ...]
    spelled: bool = False

    @property
    def pairs(self) -> bool:
        """Return whether the members are pairs."""
        return len(self.members[0]) == 2


def _word_set(name: str, of: Literal["text", "code"], members: str) -> WordSet:
    return WordSet(name, of, tuple((word,) for word in members.split()))


def _word_pairs(name: str, of: Literal["text", "code"], spelled: bool, members: str) -> WordSet:
    return WordSet(name, of, tuple(tuple(pair.split("/")) for pair in members.split()), spelled)


WORD_SETS = (
    _word_set(
        "months", "text", "January February March April May June July August September October November December"
    ),
    _word_set("weekdays", "text", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    _word_set(
        "numbers",
        "text",
        "two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty hundred thousand",
    ),
    _word_set("ordinals", "text", "first second third fourth fifth sixth seventh eighth ninth tenth"),
    _word_set("years", "text", " ".join(map(str, range(1990, 2016)))),
    _word_set(
        "countries",
        "text",
        "England Scotland Ireland France Germany Italy Spain Portugal Poland Russia China Japan India Australia Canada Mexico "
        "Brazil Egypt Greece Turkey Sweden Norway Denmark Finland Netherlands Belgium Austria Hungary Iran Iraq Israel Pakistan",
    ),
    _word_set(
        "capitals",
        "text",
        "London Paris Berlin Rome Madrid Lisbon Warsaw Moscow Beijing Tokyo Delhi Canberra Ottawa Cairo Athens Ankara Stockholm "
        "Oslo Copenhagen Helsinki Amsterdam Brussels Vienna Budapest Dublin Edinburgh Washington Jerusalem Baghdad Tehran",
    ),
    _word_set("colours", "text", "red blue green yellow black white brown grey gray orange pink purple golden silver"),
    _word_set("pronouns", "text", "he she it they we you I who him her them us me"),
    _word_set("possessives", "text", "his her its their our your my whose"),
    _word_set(
        "prepositions",
        "text",
        "in on at by for from with without into onto over under between among through during before after against towards",
    ),
    _word_set("modal verbs", "text", "can could may might must shall should will would"),
    _word_set("directions", "text", "north south east west northern southern eastern western"),
    _word_set(
        "given names", "text", "John William James George Robert Thomas Charles David Michael Richard Henry Peter Paul"
    ),
    _word_set(
        "keywords",
        "code",
        "if elif else for while try except finally with return raise yield import from def class lambda assert pass break "
        "continue del global nonlocal async await",
    ),
    _word_set("operators", "code", "+ - * / // % ** & | ^ << >>"),
    _word_set("comparisons", "code", "== != < > <= >= is in not"),
    _word_set("assignments", "code", "= += -= *= /= |= &= ^= <<= >>= :="),
    _word_set("opening brackets", "code", "( [ { (( [( ({ [[ ([ {( [{"),
    _word_set("closing brackets", "code", ") ] } )) )] }) ]] ]) )} ): )): ]: ), ], },"),
    _word_set("types", "code", "int str float bool bytes list dict tuple set object complex frozenset bytearray"),
    _word_set(
        "exceptions",
        "code",
        "ValueError TypeError KeyError IndexError OSError AttributeError RuntimeError ImportError NotImplementedError Exception "
        "StopIteration UnicodeError SyntaxError EOFError",
    ),
    _word_set("constants", "code", "None True False NotImplemented Ellipsis"),
    _word_set(
        "built-in functions",
        "code",
        "len range isinstance getattr hasattr setattr print repr sorted min max sum any all",
    ),
    _word_set("modules", "code", "os sys re time socket struct types warnings io errno string threading logging"),
    _word_pairs(
        "plurals",
        "text",
        True,
        "year/years day/days month/months game/games season/seasons song/songs film/films book/books player/players "
        "team/teams town/towns city/cities school/schools building/buildings member/members episode/episodes ship/ships "
        "line/lines name/names file/files method/methods argument/arguments value/values object/objects",
    ),
    _word_pairs(
        "capitalised",
        "text",
        True,
        "The/the In/in He/he It/it She/she They/they This/this A/a An/an On/on At/at After/after When/when While/while "
        "For/for With/with From/from By/by As/as If/if And/and But/but Not/not",
    ),
    _word_pairs(
        "past tense",
        "text",
        False,
        "is/was are/were has/had do/did go/went make/made take/took give/gave become/became begin/began come/came "
        "find/found get/got know/knew lead/led lose/lost run/ran say/said see/saw win/won write/wrote",
    ),
    _word_pairs(
        "capitals of countries",
        "text",
        False,
        "London/England Paris/France Berlin/Germany Rome/Italy Madrid/Spain Lisbon/Portugal Warsaw/Poland Moscow/Russia "
        "Beijing/China Tokyo/Japan Delhi/India Canberra/Australia Ottawa/Canada Cairo/Egypt Athens/Greece Oslo/Norway "
        "Vienna/Austria Dublin/Ireland Edinburgh/Scotland Washington/America",
    ),
    _word_pairs(
        "opposites",
        "text",
        False,
        "large/small high/low long/short old/new good/bad early/late first/last more/less before/after above/below "
        "north/south east/west left/right up/down man/woman king/queen father/mother son/daughter brother/sister",
    ),
    _word_pairs(
        "opposites in code",
        "code",
        False,
        "True/False if/else try/except min/max read/write open/close start/end start/stop "
        "first/last left/right get/set encode/decode any/all and/or input/output key/value",
    ),
)


def extract_word(chunk: bytes) -> str:
    """Return the word in a chunk, without white space and without signs around its letters and digits.

    Return an empty string for white space and for bytes that are not UTF-8.
    """
    try:
        text = chunk.decode().strip()
    except UnicodeDecodeError:
        return ""
    places = [at for at, character in enumerate(text) if character.isalnum()]
    return text[places[0] : places[-1] + 1] if places else text
