"""Load and save models in all supported formats.

    loaded = open_model("smollm2", LoadOptions(weights="stored")); save_folder(loaded.network, folder)

Each format has its own strict reader, which rejects a damaged file in one sentence and runs no code from it.

    formats            which reader reads a path: open_model, read_config
    locations          from a path, a name or a hub id to a path
    interface          LoadOptions and ModelParts, the arguments and results of all loaders
    assembly           stored tensors to a network, by a table of names
    placement          one stored tensor to its place in a network: checked, converted, packed
    tensors            tensors by name, read when needed; safetensors files
    mxfp4              weights of 4 bits in safetensors files (gpt-oss)
    quantized_folder   quantized Hugging Face folders: GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8
    quantized_formats  how these store a matrix
    folder_tokenizer   the tokenizer in a model folder
    generation_rules   tokens that generation must or must not give
    labels             the labels of a classification head
    speech             languages, tasks and timestamps in the vocabulary of a speech model
    sentence_folder    the files that the sentence-transformers library adds to a folder
    replacement        a saved folder replaces the old one in one step
    huggingface        Hugging Face folders
    huggingface_config  their config.json
    huggingface_module  modules of transformers in memory
    native             Clearhead's own folders
    packed_weights     packed weights in these folders
    recurrent          recurrent networks in Clearhead's own folders
    gguf_model         models in GGUF files
    gguf               GGUF files: header and tensors
    gguf_header        the parser of their header
    gguf_blocks        their quantized block formats
    gguf_codebooks     block formats whose quants are entries of a table
    gguf_fields        the fields of a block
    gguf_packing       blocks in the formats of the kernels, without a change of values
    gguf_save          models to GGUF files
    gguf_parts         tensors that they hold in parts or as metadata
    gguf_rotary        rotary scalings that they hold as tensors
    gguf_writer        the writer of these files
    gguf_quantizers    weights to quantized blocks
    calibration        weights rounded for a text, and what that costs
    importance         how much each input of a linear layer matters on a text
    ctranslate2_model  Marian models in CTranslate2 folders
    ctranslate2        CTranslate2 files
    llama2c            llama2.c files
    exported           networks as graphs: torch.export, ONNX files
    adapter            LoRA adapters without their model
    peft_adapter       adapters in the folder format of the PEFT library
"""

from clearhead.checkpoint.adapter import Adapter, is_adapter, merge_adapter, read_adapter, save_adapter
from clearhead.checkpoint.calibration import RoundingLoss, pack_for_text
from clearhead.checkpoint.exported import export_network, save_onnx
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer, save_tokenizer
from clearhead.checkpoint.formats import check_save_folder, open_model, read_config
from clearhead.checkpoint.gguf_save import GGUF_FILE_TYPES, save_gguf
from clearhead.checkpoint.huggingface import CONFIG_FILE, save_folder
from clearhead.checkpoint.huggingface_module import build_module, read_module, read_transformers_tokenizer
from clearhead.checkpoint.importance import measure_importance
from clearhead.checkpoint.interface import LoadOptions, ModelParts, Progress, Weights
from clearhead.checkpoint.labels import Labels
from clearhead.checkpoint.locations import resolve_path
from clearhead.checkpoint.native import save_native
from clearhead.checkpoint.peft_adapter import (
    AdapterSet,
    PeftAdapter,
    is_peft_adapter,
    merge_peft_adapter,
    read_peft_adapter,
    save_peft_adapter,
    to_peft,
)
from clearhead.checkpoint.recurrent import is_recurrent, load_recurrent, read_recurrent_config
from clearhead.checkpoint.replacement import replace_folder
from clearhead.checkpoint.sentence_folder import save_sentence_pooler
from clearhead.checkpoint.speech import SpeechSettings, speech_of_tokenizer, speech_tokens

__all__ = [
    "CONFIG_FILE",
    "GGUF_FILE_TYPES",
    "Adapter",
    "AdapterSet",
    "Labels",
    "LoadOptions",
    "ModelParts",
    "PeftAdapter",
    "Progress",
    "RoundingLoss",
    "SpeechSettings",
    "Weights",
    "build_module",
    "check_save_folder",
    "export_network",
    "is_adapter",
    "is_peft_adapter",
    "is_recurrent",
    "load_folder_tokenizer",
    "load_recurrent",
    "measure_importance",
    "merge_adapter",
    "merge_peft_adapter",
    "open_model",
    "pack_for_text",
    "read_adapter",
    "read_config",
    "read_module",
    "read_peft_adapter",
    "read_recurrent_config",
    "read_transformers_tokenizer",
    "replace_folder",
    "resolve_path",
    "save_adapter",
    "save_folder",
    "save_gguf",
    "save_native",
    "save_onnx",
    "save_peft_adapter",
    "save_sentence_pooler",
    "save_tokenizer",
    "speech_of_tokenizer",
    "speech_tokens",
    "to_peft",
]
