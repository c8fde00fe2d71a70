"""The tensor contracts, each spelled once.

* ``orchestrator``: one OpenAI request as JSON in, OpenAI events as JSON out.
* ``llm_*`` engines: token ids in, token ids out, by the contract of TensorRT-LLM 1.2's C++ Triton backend
  (model ``inflight_batcher_llm/tensorrt_llm``), whatever engine runs behind it.

Code names tensors through the constants below; a test holds every config.pbtxt equal to the tuples.
"""

from __future__ import annotations

from typing import NamedTuple

ORCHESTRATOR_MODEL = "orchestrator"

# Where the orchestrator finds the gRPC service of its own server: set by `serve`, else Triton's default.
GRPC_URL_VARIABLE = "TRITON_REALTIME_GRPC_URL"
CUDA_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"  # NVIDIA's: the GPUs that a process may see, counted from 0 in it
DEFAULT_GRPC_URL = "127.0.0.1:8001"
DEFAULT_METRICS_URL = "http://127.0.0.1:8002/metrics"

# Request headers that Triton forwards as request parameters; a client can also set parameters of these names,
# so whoever reads one validates it.
FORWARDED_HEADERS = (
    "authorization",
    "x-request-id",
    "x-deadline-ms",
    "traceparent",
    "tracestate",
    "cache-control",
)
# Those of them that are lists: of several the values are joined (RFC 9110, section 5.3).
LIST_HEADERS = ("cache-control", "tracestate")
# Those of which two would be two callers' words.
SINGLE_HEADERS = ("authorization", "x-request-id", "x-deadline-ms")


# Headers of an answer that the orchestrator knows and the gateway sends: they travel in the output `headers` of the
# first response or, with an error, in its JSON. Callers of the gRPC front find them in the same places.
ANSWER_HEADERS = (
    "retry-after",
    "x-should-retry",  # OpenAI's clients heed it
    *(f"x-ratelimit-{fact}-{what}" for what in ("requests", "tokens") for fact in ("limit", "remaining", "reset")),
)


class TensorSpec(NamedTuple):
    """One tensor of a model, as config.pbtxt declares it.

    ``dims`` leaves out the batch dimension; -1 is a dynamic length. ``scalar`` marks the tensors that NVIDIA
    declares with dims [1] and reshapes to [] (clients send [batch, 1], the model receives [batch]).
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False


# --- orchestrator ------------------------------------------------------------------------------------------

REQUEST = TensorSpec("request", "TYPE_STRING", optional=False)
EVENT = TensorSpec("event", "TYPE_STRING", optional=False)
# A JSON object of some of `ANSWER_HEADERS`, beside the first event, where there are any.
HEADERS = TensorSpec("headers", "TYPE_STRING")


# A request parameter: with it true, a request ends the running one of the same request id and is answered with an empty
# final response. The gateway makes ids that nobody can guess, the gRPC front replaces its callers' ids by such ones and
# refuses the parameter; whoever uses ids of his own on Triton's port shares them at his own risk.
CANCEL_PARAMETER = "cancel"

# A request parameter: with it, whoever sent the request says when nobody waits any more, by a cancel or a stop, and
# need not be watched closely.
SAYS_CANCELS_PARAMETER = "says_cancels"

# A request parameter for our own engine models: the id of who has joined their `token_lines`, where the tokens are to
# go instead of into responses. What is left for Triton is a refusal, or the empty final response.
TOKEN_LINES_PARAMETER = "token_lines"

# A request parameter: with it, the request is no question but an order to the cache ("wrong" or "invalidate"), its JSON
# in the place of OpenAI's. The gateway sets it on routes of its own, the gRPC front refuses it.
CACHE_OPERATION_PARAMETER = "cache_operation"
# A request parameter: with it, the request is no question but asks about the caller's key ("check", "admit" or
# "settle", see `orchestrator.limits.operations`), for what does not pass the orchestrator itself. The gRPC front
# refuses it.
LIMITS_OPERATION_PARAMETER = "limits_operation"


# --- engines -----------------------------------------------------------------------------------------------


def _scalar(name: str, dtype: str, *, optional: bool = True) -> TensorSpec:
    return TensorSpec(name, dtype, (1,), optional, scalar=True)


def _vector(name: str, dtype: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, dtype, dims or (-1,))


INPUT_IDS = _vector("input_ids", "TYPE_INT32")
INPUT_LENGTHS = _scalar("input_lengths", "TYPE_INT32", optional=False)
REQUEST_OUTPUT_LEN = _scalar("request_output_len", "TYPE_INT32", optional=False)
END_ID = _scalar("end_id", "TYPE_INT32")
PAD_ID = _scalar("pad_id", "TYPE_INT32")
TEMPERATURE = _scalar("temperature", "TYPE_FP32")
RUNTIME_TOP_K = _scalar("runtime_top_k", "TYPE_INT32")
RUNTIME_TOP_P = _scalar("runtime_top_p", "TYPE_FP32")
REPETITION_PENALTY = _scalar("repetition_penalty", "TYPE_FP32")
PRESENCE_PENALTY = _scalar("presence_penalty", "TYPE_FP32")
FREQUENCY_PENALTY = _scalar("frequency_penalty", "TYPE_FP32")
MIN_TOKENS = _scalar("min_tokens", "TYPE_INT32")
SEED = _scalar("seed", "TYPE_UINT64")
EXCLUDE_INPUT_IN_OUTPUT = _scalar("exclude_input_in_output", "TYPE_BOOL")
STREAMING = _scalar("streaming", "TYPE_BOOL")
STOP = _scalar("stop", "TYPE_BOOL")
RETURN_LOG_PROBS = _scalar("return_log_probs", "TYPE_BOOL")
# Word lists, [2, n]: row 0 the token ids of all words one after the other, row 1 where each word ends, then -1.
STOP_WORDS_LIST = _vector("stop_words_list", "TYPE_INT32", 2, -1)
BAD_WORDS_LIST = _vector("bad_words_list", "TYPE_INT32", 2, -1)
LORA_TASK_ID = _scalar("lora_task_id", "TYPE_UINT64")
# An adapter's matrices, a row for each of its modules in each layer, and of each row module id, layer and rank.
LORA_WEIGHTS = _vector("lora_weights", "TYPE_FP16", -1, -1)
LORA_CONFIG = _vector("lora_config", "TYPE_INT32", -1, 3)
GUIDED_DECODING_GUIDE_TYPE = _vector("guided_decoding_guide_type", "TYPE_STRING", 1)
GUIDED_DECODING_GUIDE = _vector("guided_decoding_guide", "TYPE_STRING", 1)

OUTPUT_IDS = TensorSpec("output_ids", "TYPE_INT32", (-1, -1), optional=False)
SEQUENCE_LENGTH = TensorSpec("sequence_length", "TYPE_INT32", (-1,), optional=False)
CUM_LOG_PROBS = TensorSpec("cum_log_probs", "TYPE_FP32", (-1,))
OUTPUT_LOG_PROBS = TensorSpec("output_log_probs", "TYPE_FP32", (-1, -1))

# In NVIDIA's order. Typed by hand from TensorRT-LLM's template; types that the template leaves to the build
# are FP32 for logits and FP16 for embedding tables and encoder features.
ENGINE_INPUTS: tuple[TensorSpec, ...] = (
    INPUT_IDS,
    _vector("encoder_input_features", "TYPE_FP16", -1, -1),
    _scalar("encoder_output_lengths", "TYPE_INT32"),
    INPUT_LENGTHS,
    REQUEST_OUTPUT_LEN,
    _scalar("num_return_sequences", "TYPE_INT32"),
    _vector("draft_input_ids", "TYPE_INT32"),
    _vector("decoder_input_ids", "TYPE_INT32"),
    _scalar("decoder_input_lengths", "TYPE_INT32"),
    _vector("draft_logits", "TYPE_FP32", -1, -1),
    _scalar("draft_acceptance_threshold", "TYPE_FP32"),
    END_ID,
    PAD_ID,
    STOP_WORDS_LIST,
    BAD_WORDS_LIST,
    _vector("embedding_bias", "TYPE_FP32"),
    _scalar("beam_width", "TYPE_INT32"),
    TEMPERATURE,
    RUNTIME_TOP_K,
    RUNTIME_TOP_P,
    _scalar("runtime_top_p_min", "TYPE_FP32"),
    _scalar("runtime_top_p_decay", "TYPE_FP32"),
    _scalar("runtime_top_p_reset_ids", "TYPE_INT32"),
    _scalar("len_penalty", "TYPE_FP32"),
    _scalar("early_stopping", "TYPE_BOOL"),
    REPETITION_PENALTY,
    MIN_TOKENS,
    _scalar("beam_search_diversity_rate", "TYPE_FP32"),
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    SEED,
    RETURN_LOG_PROBS,
    _scalar("return_context_logits", "TYPE_BOOL"),
    _scalar("return_generation_logits", "TYPE_BOOL"),
    _scalar("return_perf_metrics", "TYPE_BOOL"),
    _scalar("return_num_input_tokens", "TYPE_BOOL"),
    _scalar("return_num_output_tokens", "TYPE_BOOL"),
    EXCLUDE_INPUT_IN_OUTPUT,
    STOP,
    STREAMING,
    _vector("prompt_embedding_table", "TYPE_FP16", -1, -1),
    _vector("prompt_table_extra_ids", "TYPE_UINT64"),
    _scalar("prompt_vocab_size", "TYPE_INT32"),
    _vector("cross_attention_mask", "TYPE_BOOL", -1, -1),
    _vector("mrope_rotary_cos_sin", "TYPE_FP32"),
    _vector("mrope_position_deltas", "TYPE_INT64", 1),
    LORA_TASK_ID,
    LORA_WEIGHTS,
    LORA_CONFIG,
    _vector("context_phase_params", "TYPE_UINT8"),
    _vector("skip_cross_attn_blocks", "TYPE_BOOL", 1),
    _vector("retention_token_range_starts", "TYPE_INT32"),
    _vector("retention_token_range_ends", "TYPE_INT32"),
    _vector("retention_token_range_priorities", "TYPE_INT32"),
    _vector("retention_token_range_durations_ms", "TYPE_INT32"),
    _vector("retention_decode_priority", "TYPE_INT32", 1),
    _vector("retention_decode_duration_ms", "TYPE_INT32", 1),
    GUIDED_DECODING_GUIDE_TYPE,
    GUIDED_DECODING_GUIDE,
    _vector("lookahead_window_size", "TYPE_INT32", 1),
    _vector("lookahead_ngram_size", "TYPE_INT32", 1),
    _vector("lookahead_verification_set_size", "TYPE_INT32", 1),
)

ENGINE_OUTPUTS: tuple[TensorSpec, ...] = (
    OUTPUT_IDS,
    SEQUENCE_LENGTH,
    CUM_LOG_PROBS,
    OUTPUT_LOG_PROBS,
    TensorSpec("context_logits", "TYPE_FP32", (-1, -1)),
    TensorSpec("generation_logits", "TYPE_FP32", (-1, -1, -1)),
    TensorSpec("batch_index", "TYPE_INT32"),
    TensorSpec("sequence_index", "TYPE_INT32"),
    TensorSpec("context_phase_params", "TYPE_UINT8", (-1,)),
    TensorSpec("kv_cache_alloc_new_blocks", "TYPE_INT32"),
    TensorSpec("kv_cache_reused_blocks", "TYPE_INT32"),
    TensorSpec("kv_cache_alloc_total_blocks", "TYPE_INT32"),
    TensorSpec("arrival_time_ns", "TYPE_INT64"),
    TensorSpec("first_scheduled_time_ns", "TYPE_INT64"),
    TensorSpec("first_token_time_ns", "TYPE_INT64"),
    TensorSpec("last_token_time_ns", "TYPE_INT64"),
    TensorSpec("acceptance_rate", "TYPE_FP32"),
    TensorSpec("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorSpec("total_draft_tokens", "TYPE_INT32"),
    TensorSpec("num_input_tokens", "TYPE_INT32"),
    TensorSpec("num_output_tokens", "TYPE_INT32"),
)

# --- text engines ------------------------------------------------------------------------------------------

# The contract of TensorRT-LLM 1.2.1's LLM-API model, in NVIDIA's order: no chat template is applied, and each answer
# carries the whole text so far. Its metrics come as strings, whatever the types here say.
TEXT_INPUT = TensorSpec("text_input", "TYPE_STRING", (-1,), optional=False)
TEXT_STREAMING = TensorSpec("streaming", "TYPE_BOOL")
TEXT_STOP = TensorSpec("stop", "TYPE_BOOL")
SAMPLING_TEMPERATURE = TensorSpec("sampling_param_temperature", "TYPE_FP32")
SAMPLING_TOP_K = TensorSpec("sampling_param_top_k", "TYPE_INT32")
SAMPLING_TOP_P = TensorSpec("sampling_param_top_p", "TYPE_FP32")
SAMPLING_FREQUENCY_PENALTY = TensorSpec("sampling_param_frequency_penalty", "TYPE_FP32")
SAMPLING_PRESENCE_PENALTY = TensorSpec("sampling_param_presence_penalty", "TYPE_FP32")
SAMPLING_MAX_TOKENS = TensorSpec("sampling_param_max_tokens", "TYPE_INT32")
SAMPLING_SEED = TensorSpec("sampling_param_seed", "TYPE_UINT64")
EXCLUDE_INPUT_FROM_OUTPUT = TensorSpec("sampling_param_exclude_input_from_output", "TYPE_BOOL")
RETURN_FINISH_REASON = TensorSpec("return_finish_reason", "TYPE_BOOL")
TEXT_OUTPUT = TensorSpec("text_output", "TYPE_STRING", (-1,))
FINISH_REASON = TensorSpec("finish_reason", "TYPE_STRING", (-1,))

TEXT_ENGINE_INPUTS: tuple[TensorSpec, ...] = (
    TEXT_INPUT,
    TEXT_STREAMING,
    TensorSpec("sampling_param_best_of", "TYPE_INT32"),
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_K,
    SAMPLING_TOP_P,
    SAMPLING_FREQUENCY_PENALTY,
    SAMPLING_PRESENCE_PENALTY,
    SAMPLING_MAX_TOKENS,
    TensorSpec("sampling_param_stop", "TYPE_STRING", (-1,)),
    SAMPLING_SEED,
    EXCLUDE_INPUT_FROM_OUTPUT,
    TensorSpec("sampling_param_return_perf_metrics", "TYPE_BOOL"),
    RETURN_FINISH_REASON,
    TensorSpec("return_stop_reason", "TYPE_BOOL"),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL"),
    TEXT_STOP,
)

TEXT_ENGINE_OUTPUTS: tuple[TensorSpec, ...] = (
    TEXT_OUTPUT,
    FINISH_REASON,
    TensorSpec("stop_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("kv_cache_reused_block", "TYPE_INT32", (-1,)),
    TensorSpec("kv_cache_missed_block", "TYPE_INT32", (-1,)),
    TensorSpec("kv_cache_alloc_new_blocks", "TYPE_INT32", (-1,)),
    TensorSpec("kv_cache_alloc_total_blocks", "TYPE_INT32", (-1,)),
    TensorSpec("kv_cache_hit_rate", "TYPE_FP32", (-1,)),
    TensorSpec("arrival_time_ns", "TYPE_INT64"),
    TensorSpec("first_scheduled_time_ns", "TYPE_INT64"),
    TensorSpec("first_token_time_ns", "TYPE_INT64"),
    TensorSpec("last_token_time_ns", "TYPE_INT64"),
    TensorSpec("acceptance_rate", "TYPE_FP32"),
    TensorSpec("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorSpec("total_draft_tokens", "TYPE_INT32"),
)

# --- embedding ---------------------------------------------------------------------------------------------

# The ensemble, and its two parts. All three batch: on the wire each tensor leads with the batch.
EMBEDDING_MODEL = "embedding"
EMBEDDING_TOKENIZER_MODEL = "embedding_tokenizer"
EMBEDDING_ENCODER_MODEL = "embedding_encoder"

TEXT = TensorSpec("text", "TYPE_STRING", optional=False)
# Word pieces of the embedder; not the ids of an LLM, whose tensor has the same name.
EMBEDDING_INPUT_IDS = TensorSpec("input_ids", "TYPE_INT32", (-1,), optional=False)
ATTENTION_MASK = TensorSpec("attention_mask", "TYPE_INT32", (-1,), optional=False)  # 1: a token, 0: padding
NUM_TOKENS = TensorSpec("num_tokens", "TYPE_INT32", optional=False)  # of the text, without padding
EMBEDDING_DIMENSIONS = 384
EMBEDDING = TensorSpec("embedding", "TYPE_FP32", (EMBEDDING_DIMENSIONS,), optional=False)  # of length 1

# --- complexity --------------------------------------------------------------------------------------------

# Token ids of a conversation (`orchestrator.routing.conversation`) and their mask, as the embedder's tensors; how
# probable each of `orchestrator.routing.complexity.TIERS` is.
COMPLEXITY_MODEL = "complexity"
PROBABILITIES = TensorSpec("probabilities", "TYPE_FP32", (4,), optional=False)


# --- OCR ---------------------------------------------------------------------------------------------------

# `ocr` reads an image: its pixels and the detector's map of them by the ensemble `ocr_detection` (`image_preprocess`,
# then `ocr_detector`), each line of text by `ocr_recognizer`. All but `ocr` batch, so theirs lead with the batch.
OCR_MODEL = "ocr"
OCR_DETECTION_MODEL = "ocr_detection"
IMAGE_PREPROCESS_MODEL = "image_preprocess"
OCR_DETECTOR_MODEL = "ocr_detector"
OCR_RECOGNIZER_MODEL = "ocr_recognizer"

IMAGE = TensorSpec("image", "TYPE_STRING", optional=False)  # the bytes of a PNG, JPEG or WebP file
OCR_RESULT = TensorSpec("result", "TYPE_STRING", optional=False)  # JSON, as `orchestrator.vision.page` makes it
# Height, width, BGR: padded to a size of `orchestrator.vision.sizes`. Bytes and not numbers between 0 and 1, which the
# graphs make of them: what passes between processes is a quarter.
PIXELS = TensorSpec("pixels", "TYPE_UINT8", (-1, -1, 3), optional=False)
# Width and height of the image, upright; width and height of its picture in `pixels`, whose rest is padding.
PAGE_SIZE = TensorSpec("page_size", "TYPE_INT32", (4,), optional=False)
TEXT_MAP = TensorSpec("text_map", "TYPE_FP32", (-1, -1), optional=False)  # how probably each pixel is text
CROP = TensorSpec("crop", "TYPE_UINT8", (48, -1, 3), optional=False)  # a line, as `pixels`
# Of each column of the line, 8 pixels wide: the most probable class (0: no character), and how probable it is.
CHARACTERS = TensorSpec("characters", "TYPE_INT32", (-1,), optional=False)
CERTAINTIES = TensorSpec("certainties", "TYPE_FP32", (-1,), optional=False)


# --- speech ------------------------------------------------------------------------------------------------

# Each is there where the target has it. All hear FP32 between -1 and 1, one channel, at this rate.
VAD_MODEL = "vad"
STT_MODEL = "stt"
TURN_MODEL = "turn"
TTS_MODEL = "tts"
SAMPLE_RATE_HZ = 16_000

# `vad`: 32 ms of one person's sound at a time, who is a sequence of Triton's: requests in order, a correlation id, its
# first and its last one marked. It batches frames of several people.
FRAME_SAMPLES = 512
FRAME = TensorSpec("frame", "TYPE_FP32", (FRAME_SAMPLES,), optional=False)
SPEECH_PROBABILITY = TensorSpec("speech_probability", "TYPE_FP32", optional=False)
# Triton adds these to a sequence's requests.
SEQUENCE_START = TensorSpec("start", "TYPE_INT32", optional=False)
SEQUENCE_END = TensorSpec("end", "TYPE_INT32", optional=False)
SEQUENCE_ID = TensorSpec("sequence_id", "TYPE_UINT64", optional=False)

# `stt` and `turn`.
AUDIO = TensorSpec("audio", "TYPE_FP32", (-1,), optional=False)
SAMPLE_RATE = TensorSpec("sample_rate", "TYPE_INT32")  # of `audio`; without it, and else too, it is `SAMPLE_RATE_HZ`
# `stt`: of what is said; left out, 0, and rising where the words are improbable.
TEMPERATURE = TensorSpec("temperature", "TYPE_FP32")
PARTIAL = TensorSpec("partial", "TYPE_BOOL")  # quick and never retried: the person still speaks
TRANSCRIPT = TensorSpec("text", "TYPE_STRING", optional=False)  # empty where nobody speaks
SEGMENTS = TensorSpec("segments", "TYPE_STRING", optional=False)  # JSON, as `orchestrator.voice.transcript` makes it
# `turn`: how probably the person is done, and not just silent.
DONE_PROBABILITY = TensorSpec("done_probability", "TYPE_FP32", optional=False)

# `tts`: `text` in, a response a sentence: decoupled. A request of the same id with `CANCEL_PARAMETER` ends one.
SPEED = TensorSpec("speed", "TYPE_FP32")  # 0.25 to 4; left out, 1
PCM = TensorSpec("pcm", "TYPE_INT16", (-1,), optional=False)
PCM_RATE = TensorSpec("sample_rate", "TYPE_INT32", optional=False)
SENTENCE = TensorSpec("sentence", "TYPE_STRING", optional=False)  # what `pcm` says, as it stands in the text


# --- the gRPC front ----------------------------------------------------------------------------------------


class FrontModel(NamedTuple):
    """The tensors of a public model, as they come on the wire."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


# What it serves to strangers; all else is refused.
FRONT_MODELS = {
    ORCHESTRATOR_MODEL: FrontModel((REQUEST,), (EVENT, HEADERS)),
    EMBEDDING_MODEL: FrontModel((TEXT._replace(dims=(-1, 1)),), (EMBEDDING, NUM_TOKENS)),
    OCR_MODEL: FrontModel((IMAGE,), (OCR_RESULT,)),
}
