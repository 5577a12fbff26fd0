"""Small encoder-decoders that come inside the package, trained by the recipes of their names.

clearhead.load("capitals").generate("<U> I am a student").text   # 'I AM A STUDENT'
"""

from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A folder in our own format; Apache-2.0, as the package is."""

    name: str
    description: str

    @property
    def folder(self) -> Path:
        return HOME / self.name

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())


EXAMPLES = {
    example.name: example
    for example in (
        Example(name="capitals", description="`<U> I am` to `I AM`, `<L> I am` to `i am`, letter by letter"),
        Example(name="g2p", description="an English word in small letters to its sound in IPA, trained on CMUdict"),
    )
}
