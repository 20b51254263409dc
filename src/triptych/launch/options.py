"""The table of serving options: name, how a value is read, default, and which kinds of process read it.

The command line and the Python keywords are both derived from this table, so neither can have an option that the other
lacks, and an option that a kind of process does not read is refused for that kind.
"""

from __future__ import annotations

import difflib

from triptych.config import MIB
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.launch.option import ALL, COMPUTE, DOOR, INSTANCE, SERVER, Kind, Option
from triptych.launch.readers import (
    Reader,
    one_of,
    per_role,
    read_address,
    read_addresses,
    read_components,
    read_defaults,
    read_host,
    read_hosts,
    read_integer,
    read_keys,
    read_log_level,
    read_loras,
    read_path,
    read_ports,
    read_proxies,
    read_role,
    read_seconds,
    read_seconds_or_zero,
    read_shapes,
    read_share,
    read_size,
    read_switch,
    read_text,
)


def _option(
    name: str, read: Reader, default: object, kinds: frozenset[Kind], metavar: str, text: str, *, repeat: bool = False
) -> Option:
    return Option(name=name, read=read, default=default, kinds=kinds, metavar=metavar, help=text, repeatable=repeat)


def _urls(role: Role) -> Option:
    text = f"work addresses of {role}s to wait for, ';' between; more may join at run time"
    return _option(f"{role}_urls", read_addresses, (), SERVER, "TCP;TCP", text)


_ROLE = "monolithic, server, or one or several of encoder, denoiser, decoder with commas between"
_PORT = "first control port: the server's frontend (results arrive on the next three), or an instance's work port"

OPTIONS: tuple[Option, ...] = (
    _option(
        "model_path",
        read_path,
        None,
        ALL,
        "MODEL",
        "model folder, Hub id or embedded model (tiny); a server, which loads none, refuses instances of another one",
    ),
    _option("disagg_role", read_role, "monolithic", ALL, "ROLE", _ROLE),
    _option("disagg_server_addr", read_address, None, INSTANCE, "TCP", "the server's frontend, tcp://host:port"),
    _option("scheduler_port", read_integer, 5555, ALL, "PORT", _PORT),
    _option("host", read_host, "127.0.0.1", DOOR, "HOST", "address that HTTP and the control plane bind"),
    _option("port", read_integer, 30000, DOOR, "PORT", "HTTP port"),
    _option(
        "log_level", read_log_level, "info", ALL, "LEVEL", "debug, info, warning, error or critical: what is logged"
    ),
    _option("num_gpus", read_integer, 1, COMPUTE, "N", "GPUs of the instance"),
    _option("base_gpu_id", read_integer, 0, COMPUTE, "ID", "first GPU of the instance"),
    _option(
        "denoiser_cfg", read_integer, None, COMPUTE, "N", "2: the branches of guidance on GPUs of their own; 1: not"
    ),
    _option("denoiser_sp", read_integer, None, COMPUTE, "N", "GPUs that share a forward's tokens: ulysses x ring"),
    _option("denoiser_ulysses", read_integer, None, COMPUTE, "N", "GPUs that exchange attention heads for tokens"),
    _option("denoiser_ring", read_integer, None, COMPUTE, "N", "GPUs that pass keys and values around"),
    _option(
        "encoder_tp",
        read_integer,
        None,
        COMPUTE,
        "N",
        "GPUs that share the weights of a T5 text encoder; default: all of an instance that is an encoder alone",
    ),
    _option(
        "decoder_tp",
        read_integer,
        None,
        COMPUTE,
        "N",
        "GPUs that each decode a strip of the pictures (Wan's VAE); default: all of one that is a decoder alone",
    ),
    _option("denoiser_tp", read_integer, 1, COMPUTE, "N", "GPUs that share the weights, of Wan's transformers"),
    _option(
        "revision",
        read_text,
        None,
        COMPUTE,
        "NAME",
        "branch, tag or commit of a model from the Hub; default: its main branch",
    ),
    _option("device", one_of("cuda", "cpu"), None, COMPUTE, "{cuda,cpu}", "default: cuda where torch sees a GPU"),
    _option(
        "dtype",
        one_of("float32", "bfloat16", "float16"),
        None,
        COMPUTE,
        "DTYPE",
        "float32, bfloat16 or float16; default: bfloat16 on cuda, float32 on cpu",
    ),
    _urls(Role.ENCODER),
    _urls(Role.DENOISER),
    _urls(Role.DECODER),
    _option("disagg_timeout", read_seconds, 600.0, DOOR, "SECONDS", "running time of a request over all attempts"),
    _option("queue_timeout", read_seconds, 600.0, DOOR, "SECONDS", "waiting time of a request"),
    _option(
        "disagg_dispatch_policy",
        one_of("round_robin", "max_free_slots", "least_work"),
        "round_robin",
        DOOR,
        "POLICY",
        "round_robin, max_free_slots, or least_work: the instance whose stages will be done first, as far as is known",
    ),
    _option(
        "max_instance_deaths",
        read_integer,
        2,
        DOOR,
        "N",
        "instances that may die of one request, without a checkpoint between, before it fails",
    ),
    _option("disagg_p2p_hostname", read_host, "127.0.0.1", INSTANCE, "HOST", "address that peers reach this one under"),
    _option("disagg_ib_device", read_text, None, INSTANCE, "DEVICE", "RDMA device for Mooncake, e.g. mlx5_0"),
    _option(
        "disagg_transfer_pool_size", read_size, 256 * MIB, COMPUTE, "SIZE", "memory for tensors on their way: 256MiB"
    ),
    _option(
        "disagg_transfer_gpu_pool_size",
        read_size,
        0,
        COMPUTE,
        "SIZE",
        "memory of each role's GPU out of which others take tensors, by CUDA IPC or RDMA; 0: by host memory",
    ),
    _option(
        "disagg_transfer",
        one_of("auto", "local", "shm", "cuda-ipc", "gpudirect", "mooncake"),
        "auto",
        INSTANCE,
        "PLANE",
        "auto, local, shm, cuda-ipc, gpudirect or mooncake: how tensors travel",
    ),
    _option(
        "task",
        one_of("text-to-image", "image-to-image", "inpainting", "text-to-video", "image-to-video"),
        None,
        COMPUTE,
        "TASK",
        "what to do with the model's weights besides its own task, e.g. inpainting; `triptych models` says which can",
    ),
    _option(
        "component",
        read_components,
        None,
        COMPUTE,
        "NAME=PATH",
        "weights that replace one component's; may be repeated",
        repeat=True,
    ),
    _option(
        "default",
        read_defaults,
        None,
        COMPUTE,
        "NAME=VALUE",
        "value of a request parameter where a request does not say it, e.g. num_inference_steps=40; may be repeated",
        repeat=True,
    ),
    _option(
        "profile",
        one_of("auto", "stock", "lossless", "fast"),
        "auto",
        COMPUTE,
        "PROFILE",
        "stock Diffusers, lossless (faster kernels, equal up to rounding), fast (FP8 besides); auto: lossless on CUDA",
    ),
    _option(
        "attention_backend",
        read_text,
        "auto",
        COMPUTE,
        "NAME",
        "auto, flash3, cudnn, flash2, native, or lossy flash3-fp8, sage; of several, with commas, the first present",
    ),
    _option(
        "quant",
        per_role((Role.DENOISER,), "none", "fp8", "int8"),
        None,
        COMPUTE,
        "KIND",
        "quantised linear layers, none, fp8 or int8: of the denoiser, or ROLE=KIND; may be repeated",
        repeat=True,
    ),
    _option(
        "offload",
        per_role(ROLES, "none", "model", "block", "layer"),
        None,
        COMPUTE,
        "KIND",
        "keep weights in host memory until needed, none, model, block or layer: of all roles, or ROLE=KIND",
        repeat=True,
    ),
    _option("vae_tiling", read_switch, False, COMPUTE, "", "encode and decode large pictures in tiles"),
    _option("vae_slicing", read_switch, False, COMPUTE, "", "encode and decode the outputs of a request one by one"),
    _option(
        "prompt_cache",
        read_size,
        256 * MIB,
        COMPUTE,
        "SIZE",
        "memory for embeddings of prompts seen before, on the encoder's device; 0: none are kept",
    ),
    _option(
        "batching",
        read_switch,
        False,
        COMPUTE,
        "",
        "join the forwards of requests that run at once, where that is faster; results differ by rounding",
    ),
    _option(
        "batch_guidance",
        read_switch,
        False,
        COMPUTE,
        "",
        "compute the branches of guidance in one forward, where that is faster; results differ by rounding",
    ),
    _option(
        "step_cache",
        read_share,
        0.0,
        COMPUTE,
        "THRESHOLD",
        "let a denoising step reuse the last one's work where its first block changed by less, e.g. 0.1; lossy; 0: off",
    ),
    _option(
        "warmup",
        read_shapes,
        (),
        COMPUTE,
        "SHAPES",
        "shapes to compile and run before the first request, e.g. 832x480x81 or 832x480x81,1024x1024*2",
    ),
    _option(
        "cache_dir",
        read_path,
        None,
        COMPUTE,
        "FOLDER",
        "compiled graphs and measurements, kept for the next start; default: triptych in the user's cache folder",
    ),
    _option(
        "metrics_port",
        read_integer,
        None,
        frozenset({"server", "instance"}),
        "PORT",
        "port of Prometheus metrics, 0: none; default: 10000 above an instance's work port, --port of a server",
    ),
    _option(
        "lora",
        read_loras,
        (),
        COMPUTE,
        "NAME=PATH[,SECOND][:SCALE]",
        "LoRA adapter (a safetensors file, and one for the second transformer of models that have two) that requests "
        "may name; may be repeated; for denoisers, and for encoders where it changes a text encoder",
        repeat=True,
    ),
    _option(
        "previews",
        read_switch,
        False,
        COMPUTE,
        "",
        "of denoisers: let requests ask for small pictures while they are denoised",
    ),
    _option("max_running_requests", read_integer, 1, COMPUTE, "N", "requests whose denoising steps interleave"),
    _option(
        "checkpoint_interval",
        read_seconds_or_zero,
        10.0,
        COMPUTE,
        "SECONDS",
        "time between checkpoints of a denoising request, kept by another instance; 0: none",
    ),
    _option(
        "drain_timeout",
        read_seconds_or_zero,
        30.0,
        INSTANCE,
        "SECONDS",
        "time to finish or hand over its work when asked to stop; 0: leave at once",
    ),
    _option("slots", read_integer, 2, COMPUTE, "N", "requests held at once: computing, or with inputs pulled ahead"),
    _option("disagg_key_dir", read_path, None, ALL, "DIR", "keys of the control plane, made by `triptych keygen DIR`"),
    _option("insecure", read_switch, False, ALL, "", "allow binding beyond loopback without authentication"),
    _option("output_dir", read_path, "outputs", DOOR, "FOLDER", "where finished media files are kept"),
    _option("media_store", read_text, None, DOOR, "URL", "keep media in this fsspec store instead: s3://bucket/prefix"),
    _option("state_dir", read_path, None, DOOR, "FOLDER", "journal of accepted jobs; default: output-dir with -state"),
    _option("max_live_requests", read_integer, 1000, DOOR, "N", "requests that wait or run at once; more get 429"),
    _option(
        "max_upload_memory",
        read_size,
        2048 * MIB,
        DOOR,
        "SIZE",
        "memory for bodies and pictures: 8GiB; more get 429",
    ),
    _option("max_queue", read_integer, None, DOOR, "N", "requests that wait at once; more get 429; default: no limit"),
    _option("max_wait", read_seconds, None, DOOR, "SECONDS", "predicted waiting beyond which requests get 429"),
    _option("timeout_cap", read_seconds, 3600.0, DOOR, "SECONDS", "most that a request may set its own timeouts to"),
    _option(
        "task_ports", read_ports, None, DOOR, "E,T,D", "ports for tasks in three posts: ENCODER,TRANSFORMER,DECODER"
    ),
    _option(
        "api_key",
        read_keys,
        (),
        DOOR,
        "KEY",
        "HTTP API key, or its digest sha256:HEX; may be repeated (a file keeps keys out of process lists)",
        repeat=True,
    ),
    _option("api_key_file", read_path, None, DOOR, "FILE", "file with an HTTP API key, or its digest, on each line"),
    _option("max_concurrency_per_key", read_integer, None, DOOR, "N", "requests of one API key at once; more get 429"),
    _option("max_rate_per_key", read_integer, None, DOOR, "N", "requests of one API key a minute; more get 429"),
    _option(
        "forwarded_allow_ips",
        read_proxies,
        None,
        DOOR,
        "IP,NETWORK",
        "proxies whose X-Forwarded-Proto and -For are believed, * for all; default: FORWARDED_ALLOW_IPS, or loopback",
    ),
    _option(
        "allowed_hosts",
        read_hosts,
        None,
        DOOR,
        "NAME,NAME",
        "names of the server, as in Host headers, that are neither addresses nor localhost; * for all",
    ),
    _option("input_root", read_path, None, DOOR, "FOLDER", "folder from which requests may name pictures by path"),
    _option("allow_image_urls", read_switch, False, DOOR, "", "fetch pictures that requests name by http(s) URL"),
    _option("retain_seconds", read_seconds, None, DOOR, "SECONDS", "forget ended jobs and their media after this time"),
    _option("retain_count", read_integer, 10_000, DOOR, "N", "ended jobs kept with their media; the oldest go first"),
    _option(
        "retain_bytes", read_size, None, DOOR, "SIZE", "media kept of ended jobs, e.g. 100GiB; the oldest go first"
    ),
)
"""All serving options, in the order in which the help shows them."""

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


def unknown_option(name: str, *also: str) -> ConfigError:
    """The error of a name that is no option; ``also`` are other names that would have done."""
    known = (*BY_NAME, *also)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"{name}: unknown option; {hint}")
