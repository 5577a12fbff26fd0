"""Small encoder-decoders that are part of the package, trained by the recipes of the same names.

clearhead.load("capitals").generate("<U> I am a student").text   # 'I AM A STUDENT'
"""

from dataclasses import dataclass
from pathlib import Path

_BUNDLED_FOLDER = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model in Clearhead's own format inside the package."""

    name: str
    description: str
    license: str = "Apache-2.0"  # as the package

    @property
    def folder(self) -> Path:
        """The folder that contains the model."""
        return _BUNDLED_FOLDER / self.name

    @property
    def installed_bytes(self) -> int:
        """The size of all its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


BUNDLED_MODELS = {
    model.name: model
    for model in (
        BundledModel(name="capitals", description="turns `<U> I am` into `I AM` and `<L> I am` into `i am`"),
        BundledModel(name="g2p", description="turns an English word in lower case into its pronunciation in IPA"),
    )
}
