"""The fields of every request, as JSON Schema with a description, in one table per endpoint. Without HTTP.

    table = completion_fields(Limits()); table["n"].schema

A field of OpenAI's API that this server does not support is in the table too: its schema allows only the values that
change nothing, and `unsupported` says why the others are refused. null always means the default.
"""

from typing import Any

from clearhead.server.schema_parts import BOOLEAN, INT64, STRING, TOKEN_ID, Field, Table, number, refused, whole
from clearhead.server.settings import Limits
from clearhead.server.tool_fields import call_schema, tool_fields


def _strings(limits: Limits) -> dict[str, Any]:
    one = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_characters}
    return {"anyOf": [one, {"type": "array", "items": one, "maxItems": limits.max_stop_strings}]}


def _prompts(limits: Limits) -> dict[str, Any]:
    ids = {"type": "array", "items": TOKEN_ID, "minItems": 1}
    several = {"minItems": 1, "maxItems": limits.max_prompts, "type": "array"}
    return {"anyOf": [STRING, {**several, "items": STRING}, ids, {**several, "items": ids}]}


def identity_fields() -> Table:
    """Return fields that name the caller or the purpose of a request and change nothing."""
    labels = {"type": "object", "additionalProperties": STRING, "maxProperties": 16}
    return {
        "user": Field(STRING, "An identifier of the end user; it is not used."),
        "metadata": Field(labels, "Labels of the caller; they are not used."),
        "safety_identifier": Field(STRING, "An identifier of the end user; it is not used."),
        "prompt_cache_key": Field(STRING, "A hint for caches; prefixes are found by their content."),
        "prompt_cache_retention": Field(
            {"enum": ["in_memory", "in-memory", "24h"]}, "A hint for caches; it is not used."
        ),
        "service_tier": refused("there is only one tier", "auto", "default"),
        "store": refused("answers are not stored", False),
    }


def _generation_fields(limits: Limits) -> Table:
    """Return fields of /v1/completions and /v1/chat/completions."""
    stream_options = {
        "type": "object",
        "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN, "include_obfuscation": BOOLEAN},
        "additionalProperties": False,
    }
    return {
        "model": Field(STRING, "The model; one of /v1/models. It may be left out."),
        "n": Field(whole(1, limits.max_choices), "Number of texts per prompt."),
        "stream": Field(BOOLEAN, "Send the text as server-sent events while it is generated."),
        "stream_options": Field(stream_options, "include_usage adds a last event with the numbers of tokens."),
        **sampling_fields(limits),
        **identity_fields(),
    }


def sampling_fields(limits: Limits) -> Table:
    """Return fields of every request that generates text; those after `seed` are known from other servers."""
    biases = {"type": "object", "additionalProperties": number(-100, 100), "maxProperties": limits.max_logit_biases}
    ids = {"type": "array", "items": TOKEN_ID, "maxItems": limits.max_logit_biases}
    probability = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    return {
        "temperature": Field(number(0, 2), "0 takes the most likely token; by default 1."),
        "top_p": Field(probability, "Sample from the most likely tokens that reach this total probability."),
        "presence_penalty": Field(number(-2, 2), "Subtracted from the logit of each token that the text contains."),
        "frequency_penalty": Field(number(-2, 2), "Subtracted from a logit for each occurrence in the text."),
        "logit_bias": Field(biases, "Values to add to the logits of tokens, by token id."),
        "stop": Field(_strings(limits), "Strings that end the text; the text does not contain them."),
        "seed": Field(INT64, "Seed of the random numbers; the same seed gives the same text."),
        "top_k": Field(INT64 | {"minimum": -1}, "Sample from the k most likely tokens; 0 and -1 keep all."),
        "min_p": Field(number(0, 1), "Minimum probability relative to the most likely token."),
        "repetition_penalty": Field(
            {"type": "number", "exclusiveMinimum": 0, "maximum": 100}, "Above 1, repeated tokens become less likely."
        ),
        "min_tokens": Field(whole(0, limits.max_new_tokens), "Minimum number of new tokens."),
        "ignore_eos": Field(BOOLEAN, "Continue after the model's own stop tokens."),
        "stop_token_ids": Field(ids, "Token ids that end the text."),
        "cache_salt": Field(
            {"type": "string", "minLength": 1}, "Requests share cached prefixes only if they have the same salt."
        ),
        "skip_special_tokens": refused("special tokens are never part of the text", True),
        "include_stop_str_in_output": refused("a text ends before its stop string", False),
        "truncate_prompt_tokens": refused("prompts are never truncated"),
    }


def completion_fields(limits: Limits) -> Table:
    """Return the fields of /v1/completions."""
    return {
        **_generation_fields(limits),
        "prompt": Field(_prompts(limits), "A text, token ids, or a list of either.", required=True),
        "max_tokens": Field(whole(0, limits.max_new_tokens), "Maximum number of new tokens; by default 16."),
        "echo": Field(BOOLEAN, "Return the prompt in front of the text."),
        "logprobs": Field(
            whole(0, limits.max_logprobs), "Return log-probabilities of the tokens and of this many alternatives."
        ),
        "best_of": Field(whole(1, limits.max_choices), "Only the value of n is supported."),
        "add_special_tokens": Field(BOOLEAN, "Add the model's special tokens, such as BOS, to texts; by default true."),
        "suffix": refused("models here only continue a text", ""),
    }


def chat_fields(limits: Limits) -> Table:
    """Return the fields of /v1/chat/completions."""
    tokens = whole(1, limits.max_new_tokens)
    deprecated = "it was replaced by tools"
    return {
        **_generation_fields(limits),
        "messages": Field(_message_schema(limits), "The conversation.", required=True),
        "max_tokens": Field(tokens, "Maximum number of new tokens; by default what the context has room for."),
        "max_completion_tokens": Field(tokens, "The newer name of max_tokens."),
        "logprobs": Field(BOOLEAN, "Return the log-probabilities of the tokens."),
        "top_logprobs": Field(whole(0, limits.max_logprobs), "Number of alternatives; needs logprobs."),
        "response_format": Field(_response_format_schema(), "text, json_object, or json_schema with a schema."),
        "chat_template_kwargs": Field(
            {"type": "object", "maxProperties": 32}, "Further variables of the chat template, such as enable_thinking."
        ),
        "add_generation_prompt": Field(BOOLEAN, "Begin the assistant's answer; by default true."),
        "modalities": refused("models here write text only", ["text"]),
        **tool_fields(limits),
        "functions": refused(deprecated, []),
        "function_call": refused(deprecated, "none", "auto"),
        "reasoning_effort": refused("use chat_template_kwargs for templates that have such a setting", "none"),
        "verbosity": refused("models here have no such setting", "medium"),
        "prediction": refused("predicted outputs are not used"),
        "audio": refused("models here write text only"),
        "web_search_options": refused("the server does not search the web"),
        "moderation": refused("texts are not moderated"),
        "chat_template": refused("templates are programs, and only the model's own is run"),
        "continue_final_message": refused("an answer always begins a new message", False),
    }


def _message_schema(limits: Limits) -> dict[str, Any]:
    """Return the schema of a list of messages."""
    part = {
        "type": "object",
        "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": STRING},
        "required": ["type", "text"],
    }
    content = {"anyOf": [STRING, {"type": "array", "items": part}]}
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": content,
            "name": STRING,
            "tool_calls": {"type": "array", "items": call_schema(), "maxItems": limits.max_tools},
            "tool_call_id": STRING,
            "reasoning_content": STRING,
        },
        "required": ["role"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1, "maxItems": limits.max_messages}


def _response_format_schema() -> dict[str, Any]:
    """Return the schema of response_format."""
    json_schema = {
        "type": "object",
        "properties": {
            "name": STRING,
            "description": STRING,
            "schema": {"anyOf": [{"type": "object"}, BOOLEAN]},
            "strict": BOOLEAN,
        },
        "required": ["schema"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": json_schema},
        "required": ["type"],
        "additionalProperties": False,
    }


def embedding_fields(limits: Limits) -> Table:
    """Return the fields of /v1/embeddings."""
    return {
        "model": Field(STRING, "The model; one of /v1/models. It may be left out."),
        "input": Field(_prompts(limits), "A text, token ids, or a list of either.", required=True),
        "encoding_format": Field({"enum": ["float", "base64"]}, "float (default), or base64 of float32."),
        "dimensions": Field(whole(1, 2**20), "The width of the model; vectors are not shortened."),
        "user": Field(STRING, "A name of the end user; it is not used."),
    }


def tokenize_fields(limits: Limits) -> Table:
    """Return the fields of /tokenize: a prompt, or messages for the chat template."""
    return {
        "model": Field(STRING, "The model; one of /v1/models. It may be left out."),
        "prompt": Field(STRING, "The text."),
        "messages": Field(_message_schema(limits), "A conversation, instead of a text."),
        "add_special_tokens": Field(BOOLEAN, "Add the model's special tokens; by default true for a text."),
        "add_generation_prompt": Field(BOOLEAN, "Begin the assistant's answer; by default true."),
        "chat_template_kwargs": Field({"type": "object", "maxProperties": 32}, "Variables of the chat template."),
        "return_token_strs": Field(BOOLEAN, "Return the text of each token, too."),
    }


def detokenize_fields(limits: Limits) -> Table:
    """Return the fields of /detokenize."""
    return {
        "model": Field(STRING, "The model; one of /v1/models. It may be left out."),
        "tokens": Field({"type": "array", "items": TOKEN_ID}, "Token ids.", required=True),
        "skip_special_tokens": Field(BOOLEAN, "Leave special tokens out; by default false."),
    }
