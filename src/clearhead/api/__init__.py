"""The public Python interface: load or create a model, then generate, ask, stream, chat, score, embed, trace and save.

    model = clearhead.load("smollm2"); print(model.generate("The capital of France is", max_new_tokens=8))

model           Model: a network with its tokenizer and everything a user does with them
text_reader     what a model does in one forward pass: embed (embedding), classify and rerank (classification)
speech_reader   what a model does with recordings: transcribe
languages       the languages of a translation
interop         what a model offers to other libraries; save_onnx: its network as an ONNX file
loading         load, from_huggingface, create: a model from a checkpoint, a module of transformers or a config
architectures   cost, summarize: functions about an architecture, by name or config
devices         dtypes and devices by name
checks          checks of arguments
description     what repr shows
progress        a bar over the texts of a call
recurrent       RecurrentBaseline: the recurrent encoder-decoder with the same interface
chat            Chat: a conversation that keeps its cache between turns
gguf_saving     save_gguf: a model as a GGUF file
quantizing      quantize_for_text: packed weights, rounded for a text
"""

from clearhead.api.architectures import cost, find_config, recurrent_cost, summarize, summarize_recurrent
from clearhead.api.chat import Chat
from clearhead.api.checks import check_format
from clearhead.api.devices import DTYPES, resolve_device
from clearhead.api.gguf_saving import save_gguf
from clearhead.api.interop import save_onnx
from clearhead.api.loading import create, from_huggingface, load
from clearhead.api.model import Model
from clearhead.api.quantizing import quantize_for_text
from clearhead.api.recurrent import RecurrentBaseline

__all__ = [
    "DTYPES",
    "Chat",
    "Model",
    "RecurrentBaseline",
    "check_format",
    "cost",
    "create",
    "find_config",
    "from_huggingface",
    "load",
    "quantize_for_text",
    "recurrent_cost",
    "resolve_device",
    "save_gguf",
    "save_onnx",
    "summarize",
    "summarize_recurrent",
]
