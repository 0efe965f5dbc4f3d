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
        spelled: whether the members, or the halves of a pair, also look alike, so that spelling finds most of them.
    """

    name: str
    of: Literal["text", "code"]
    members: tuple[tuple[str, ...], ...]
    spelled: bool = False

    @property
    def pairs(self) -> bool:
        """Return whether the members are pairs."""
        return len(self.members[0]) == 2


# Members of each set, and pairs by their halves.
_TEXT = {
    "months": "January February March April May June July August September October November December",
    "weekdays": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "numbers": "two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty hundred "
    "thousand",
    "ordinals": "first second third fourth fifth sixth seventh eighth ninth tenth",
    "years": " ".join(map(str, range(1990, 2016))),
    "countries": "England Scotland Ireland France Germany Italy Spain Portugal Poland Russia China Japan India Australia "
    "Canada Mexico Brazil Egypt Greece Turkey Sweden Norway Denmark Finland Netherlands Belgium Austria Hungary Iran Iraq Israel Pakistan",
    "capitals": "London Paris Berlin Rome Madrid Lisbon Warsaw Moscow Beijing Tokyo Delhi Canberra Ottawa Cairo Athens "
    "Ankara Stockholm Oslo Copenhagen Helsinki Amsterdam Brussels Vienna Budapest Dublin Edinburgh Washington Jerusalem Baghdad Tehran",
    "colours": "red blue green yellow black white brown grey gray orange pink purple golden silver",
    "pronouns": "he she it they we you I who him her them us me",
    "possessives": "his her its their our your my whose",
    "prepositions": "in on at by for from with without into onto over under between among through during before after against "
    "towards",
    "modal verbs": "can could may might must shall should will would",
    "directions": "north south east west northern southern eastern western",
    "given names": "John William James George Robert Thomas Charles David Michael Richard Henry Peter Paul",
}
_CODE = {
    "keywords": "if elif else for while try except finally with return raise yield import from def class lambda assert pass "
    "break continue del global nonlocal async await",
    "operators": "+ - * / // % ** & | ^ << >>",
    "comparisons": "== != < > <= >= is in not",
    "assignments": "= += -= *= /= |= &= ^= <<= >>= :=",
    "opening brackets": "( [ { (( [( ({ [[ ([ {( [{",
    "closing brackets": ") ] } )) )] }) ]] ]) )} ): )): ]: ), ], },",
    "types": "int str float bool bytes list dict tuple set object complex frozenset bytearray",
    "exceptions": "ValueError TypeError KeyError IndexError OSError AttributeError RuntimeError ImportError "
    "NotImplementedError Exception StopIteration UnicodeError SyntaxError EOFError",
    "constants": "None True False NotImplemented Ellipsis",
    "built-in functions": "len range isinstance getattr hasattr setattr print repr sorted min max sum any all",
    "modules": "os sys re time socket struct types warnings io errno string threading logging",
}
_TEXT_PAIRS = {
    "plurals": "year/years day/days month/months game/games season/seasons song/songs film/films book/books player/players "
    "team/teams town/towns city/cities school/schools building/buildings member/members episode/episodes "
    "ship/ships line/lines name/names file/files method/methods argument/arguments value/values object/objects",
    "capitalised": "The/the In/in He/he It/it She/she They/they This/this A/a An/an On/on At/at After/after When/when "
    "While/while For/for With/with From/from By/by As/as If/if And/and But/but Not/not",
    "past tense": "is/was are/were has/had do/did go/went make/made take/took give/gave become/became begin/began come/came "
    "find/found get/got know/knew lead/led lose/lost run/ran say/said see/saw win/won write/wrote",
    "capitals of countries": "London/England Paris/France Berlin/Germany Rome/Italy Madrid/Spain Lisbon/Portugal Warsaw/Poland "
    "Moscow/Russia Beijing/China Tokyo/Japan Delhi/India Canberra/Australia Ottawa/Canada Cairo/Egypt "
    "Athens/Greece Oslo/Norway Vienna/Austria Dublin/Ireland Edinburgh/Scotland Washington/America",
    "opposites": "large/small high/low long/short old/new good/bad early/late first/last more/less before/after above/below "
    "north/south east/west left/right up/down man/woman king/queen father/mother son/daughter brother/sister",
}
_CODE_PAIRS = {
    "opposites in code": "True/False if/else try/except min/max read/write open/close start/end start/stop first/last left/right "
    "get/set encode/decode any/all and/or input/output key/value"
}
_SPELLED = ("years", "plurals", "capitalised", "past tense")  # spelling alone finds most members


def _make_sets(language: Literal["text", "code"], sets: dict[str, str], pairs: dict[str, str]) -> list[WordSet]:
    members: dict[str, list[tuple[str, ...]]] = {name: [(word,) for word in sets[name].split()] for name in sets}
    members |= {name: [tuple(pair.split("/")) for pair in pairs[name].split()] for name in pairs}
    return [WordSet(name, language, tuple(words), name in _SPELLED) for name, words in members.items()]


WORD_SETS = (*_make_sets("text", _TEXT, _TEXT_PAIRS), *_make_sets("code", _CODE, _CODE_PAIRS))


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
