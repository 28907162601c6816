"""What the names in a pickle are known for: ways to run code, and the packages whose classes checkpoints contain.

Only data and their look-up; `audit` decides. Ways to run code: the detections and the advisories of picklescan,
modelscan and fickling, and Python's documentation of modules that call, import or run what they are given.
"""

from __future__ import annotations

# Modules under which something is named that is no class or function.
EXTENSION = "copyreg"  # the module under which extension codes are named, as "extension 5"
PERSISTENT = "(persistent id)"  # the module under which persistent ids are named that are not of torch.save
BOMB = "(bomb)"  # the module under which what exhausts memory is named

# Start of a full name -> what it does. The longest start decides. A name in no row is dangerous all the same if it is
# of the standard library and not known to be harmless.
_TECHNIQUES: dict[str, str] = {
    **dict.fromkeys(
        (
            "os", "posix", "nt", "subprocess", "_posixsubprocess", "pty", "popen2", "commands", "pexpect", "sh",
            "plumbum", "fabric", "invoke", "psutil.Popen", "gevent.subprocess", "multiprocessing.util.spawnv_passfds",
            "uuid._get_command_stdout", "_aix_support", "_osx_support", "_pyrepl.pager", "pydoc.pipepager",
            "pydoc.tempfilepager", "torch.utils.collect_env", "ctypes.util", "test.support.script_helper",
            "torch.distributed.elastic.multiprocessing", "torch.distributed.launcher", "imaplib.IMAP4_stream",
        ),
        "it runs commands or changes the system",
    ),
    **dict.fromkeys(("os.environ", "posix.environ"), "it changes the environment of the process"),
    **dict.fromkeys(("asyncio", "_overlapped"), "it starts processes or opens connections"),
    "multiprocessing": "it starts processes",
    "torch.multiprocessing": "it starts processes",
    "concurrent": "it starts processes",
    **dict.fromkeys(
        (
            "builtins.eval", "builtins.exec", "builtins.compile", "builtins.execfile", "__builtin__.eval",
            "__builtin__.exec", "__builtin__.execfile", "__builtin__.compile", "code", "codeop", "timeit", "cProfile",
            "profile", "trace", "pdb", "bdb", "doctest", "dataclasses._create_fn", "dataclasses.make_dataclass",
            "typing._eval_type", "typing.get_type_hints", "typing.ForwardRef", "sympy", "pandas.eval",
            "pandas.core.computation", "numexpr", "idlelib", "IPython", "numpy.f2py", "numpy.testing",
            "torch.utils.bottleneck", "torch._dynamo.guards", "torch.fx.experimental",
            "torch.jit.unsupported_tensor_ops",
            "torch.utils.data.datapipes", "torch.distributed.checkpoint.examples", "collections.namedtuple", "ast",
            "inspect", "string.Template", "unittest", "_testcapi", "jinja2", "mako", "enum._simple_enum",
        ),
        "it runs Python code",
    ),
    **dict.fromkeys(("runpy", "site", "zipapp", "pyclbr", "modulefinder"), "it runs a file or module as a program"),
    **dict.fromkeys(("pip", "ensurepip", "setuptools", "distutils", "venv", "pkg_resources"), "it installs packages"),
    **dict.fromkeys(
        (
            "importlib", "imp", "zipimport", "pkgutil", "pydoc.locate", "pydoc.safeimport", "builtins.__import__",
            "__builtin__.__import__", "torch.package", "pyximport", "cgitb", "six.moves", "past", "_frozen_importlib",
            "_frozen_importlib_external", "_imp",
        ),
        "it imports a module by name",
    ),
    **dict.fromkeys(
        ("types", "marshal", "_xxsubinterpreters", "_interpreters", "new"), "it makes functions from code objects"
    ),
    **dict.fromkeys(("ctypes", "_ctypes", "cffi", "torch.ops", "torch.classes"), "it loads or calls machine code"),
    **dict.fromkeys(
        ("torch.utils.cpp_extension", "torch._inductor", "lib2to3", "Cython"), "it compiles code or loads it"
    ),
    **dict.fromkeys(
        (
            "builtins.getattr", "__builtin__.getattr", "operator.attrgetter", "_operator.attrgetter",
            "builtins.vars", "builtins.globals", "builtins.locals", "__builtin__.vars", "__builtin__.globals",
            "builtins.dir", "inspect.getattr_static", "operator", "_operator",
        ),
        "it reaches functions through attributes or items",
    ),
    **dict.fromkeys(
        (
            "operator.methodcaller", "_operator.methodcaller", "operator.call", "_operator.call", "builtins.map",
            "builtins.filter", "__builtin__.map", "__builtin__.filter", "itertools.imap", "functools.reduce",
            "_functools.reduce", "builtins.reduce", "__builtin__.reduce", "__builtin__.apply", "functools",
            "_functools", "itertools.starmap", "itertools.accumulate", "itertools.groupby", "itertools.takewhile",
            "itertools.dropwhile", "itertools.filterfalse", "threading", "_thread", "thread", "sched", "atexit",
            "signal", "weakref.finalize", "contextlib", "queue", "bisect", "heapq",
        ),
        "it calls functions that are given to it",
    ),
    **dict.fromkeys(
        ("builtins.setattr", "__builtin__.setattr", "builtins.delattr", "builtins.type", "__builtin__.type", "sys",
         "gc", "warnings", "copyreg", "copy_reg", "abc"),
        "it changes or makes classes of the process",
    ),
    **dict.fromkeys(
        (
            "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "shelve", "torch.load",
            "torch.storage._load_from_bytes", "torch.serialization", "torch.jit", "numpy.load", "pandas.read_pickle",
            "pandas.io.pickle", "yaml", "ruamel", "torch.distributed.rpc", "torch.distributed.distributed_c10d",
            "keras.models.load_model", "tensorflow.keras.models.load_model", "pickletools", "sklearn.externals.joblib",
            "numpy.core.multiarray.load", "xmlrpc", "xmlrpclib",
        ),
        "it unpickles other bytes or files, or loads code with them",
    ),
    **dict.fromkeys(("torch.hub", "webbrowser", "antigravity", "urllib", "urllib2", "http", "httplib", "socket",
        "_socket", "ftplib", "smtplib", "telnetlib", "poplib", "imaplib", "nntplib", "socketserver", "ssl", "_ssl",
        "requests", "httpx", "aiohttp", "urllib3", "paramiko", "boto3", "wsgiref", "asyncore", "asynchat", "smtpd",
        "fsspec"), "it opens connections or downloads"),
    "logging.config": "it calls what a configuration names",
    **dict.fromkeys(
        (
            "builtins.open", "__builtin__.open", "__builtin__.file", "io", "_io", "codecs", "shutil", "tempfile",
            "pathlib", "zipfile", "tarfile", "gzip", "bz2", "lzma", "_lzma", "_bz2", "sqlite3", "_sqlite3", "dbm",
            "fileinput", "mmap", "logging", "glob", "filecmp", "numpy.memmap", "numpy.save", "numpy.from",
            "numpy.genfromtxt", "numpy.core.memmap", "numpy._core.memmap", "numpy.DataSource", "torch.save",
            "torch.from_file", "numpy.ndarray.tofile", "csv", "plistlib", "netrc", "mailbox", "posixpath", "ntpath",
            "linecache", "tokenize", "numpy.lib", "configparser", "wave",
        ),
        "it reads or writes files",
    ),
    "test": "it is of Python's own tests",
    "copyreg.extension": "an extension code calls what the program that unpickles has registered",
    "(bomb)": "it exhausts memory",
    "(persistent id)": "a persistent id calls what the program that unpickles has registered",
}  # fmt: skip

# Packages whose classes checkpoints contain -> what they are called.
_FRAMEWORKS: dict[str, str] = {
    "deepspeed": "DeepSpeed", "megatron": "Megatron", "transformer_engine": "Transformer Engine", "apex": "Apex",
    "lightning": "Lightning", "pytorch_lightning": "Lightning", "lightning_fabric": "Lightning",
    "lightning_utilities": "Lightning", "transformers": "transformers", "accelerate": "accelerate", "peft": "PEFT",
    "trl": "TRL", "diffusers": "diffusers", "tokenizers": "tokenizers", "sentence_transformers":
    "Sentence Transformers", "omegaconf": "omegaconf", "hydra": "Hydra", "nemo": "NeMo", "fairseq": "fairseq",
    "fairscale": "FairScale", "mmengine": "MMEngine", "mmcv": "MMCV", "mmdet": "MMDetection", "mmseg": "MMSegmentation",
    "detectron2": "Detectron2", "fvcore": "fvcore", "ultralytics": "Ultralytics", "timm": "timm", "torchvision":
    "torchvision", "torchaudio": "torchaudio", "torchtext": "torchtext", "torchao": "torchao", "torchtune":
    "torchtune", "torchtitan": "torchtitan", "torchdata": "torchdata", "torch_geometric": "PyG", "torchmetrics":
    "TorchMetrics", "torch_checkpointing": "torch checkpointing", "bitsandbytes": "bitsandbytes", "optimum": "Optimum",
    "xformers": "xFormers", "flash_attn": "FlashAttention", "colossalai": "ColossalAI", "composer": "Composer",
    "sklearn": "scikit-learn", "scipy": "SciPy", "pandas": "pandas", "xgboost": "XGBoost", "lightgbm": "LightGBM",
    "catboost": "CatBoost", "gym": "Gym", "gymnasium": "Gymnasium", "stable_baselines3": "Stable-Baselines3",
    "sb3_contrib": "Stable-Baselines3", "ml_dtypes": "ml_dtypes", "jax": "JAX", "jaxlib": "JAX", "flax": "Flax",
    "optax": "Optax", "orbax": "Orbax", "haiku": "Haiku", "easydict": "EasyDict", "yacs": "yacs", "munch": "Munch",
    "addict": "addict", "ml_collections": "ml_collections", "pydantic": "pydantic", "pydantic_core": "pydantic",
    "attr": "attrs", "attrs": "attrs", "gpytorch": "GPyTorch", "botorch": "BoTorch", "kornia": "Kornia", "espnet":
    "ESPnet", "espnet2": "ESPnet", "speechbrain": "SpeechBrain", "pyannote": "pyannote", "spacy": "spaCy", "thinc":
    "Thinc", "sentencepiece": "SentencePiece", "open_clip": "OpenCLIP", "monai": "MONAI", "allennlp": "AllenNLP",
    "flair": "Flair", "fastai": "fastai", "ignite": "Ignite", "catalyst": "Catalyst", "__torch__": "TorchScript",
    "safetensors": "safetensors", "quanto": "quanto", "auto_gptq": "AutoGPTQ", "awq": "AWQ", "hqq": "HQQ", "dgl": "DGL",
    "compressed_tensors": "compressed-tensors", "modelopt": "ModelOpt", "pytz": "pytz", "dateutil": "dateutil",
    "tqdm": "tqdm", "packaging": "packaging", "PIL": "Pillow", "zarr": "Zarr", "tensorstore": "TensorStore",
}  # fmt: skip
# Words in the names of classes that are not data: they stay unknown, whatever package they are of.
_ACTIVE = (
    "process", "launch", "command", "shell", "server", "client", "importer", "interpreter", "executor", "agent",
    "download", "unpickler", "console", "debugger", "script", "daemon", "worker", "spawn", "loader", "template",
    "writer", "hdfstore", "fortranfile", "runner",
)  # fmt: skip
_LOADERS = ("dataloader", "lossscaler", "sampler", "loadertypes")  # classes with such a word that are data
# Functions of these packages by which they rebuild data.
_REBUILDERS = (
    "pandas._libs.internals._unpickle_block", "pandas.core.indexes.base._new_Index",
    "pandas.core.internals.managers.", "pandas.core.indexes.datetimes._new_DatetimeIndex", "pytz._p", "pytz._UTC",
    "pandas.core.arrays.", "pandas._libs.arrays.__pyx_unpickle", "pandas._libs.tslibs.timestamps._unpickle_timestamp",
    "deepspeed.utils.tensor_fragment.fragment_address", "deepspeed.utils.tensor_fragment.tensor_fragment",
    "gym.utils.seeding", "gymnasium.utils.seeding", "dateutil.tz", "ml_dtypes", "jax._src.array._reconstruct_array",
    "sklearn._loss", "sklearn.neighbors._", "sklearn.tree._tree", "lightning.fabric.wrappers._unwrap",
    "transformers.utils.generic.", "omegaconf.dictconfig", "omegaconf.listconfig",
    "tqdm.std.tqdm",
    "lightning.pytorch.utilities.parsing.AttributeDict", "scipy.interpolate",
)  # fmt: skip


def technique(full: str) -> str:
    """Return what a full name does if it is a known way to run code, else ""."""
    parts = full.split(".")
    for n in range(len(parts), 0, -1):
        found = _TECHNIQUES.get(".".join(parts[:n]))
        if found:
            return found
    return ""


def framework(module: str, name: str) -> str:
    """Return the package that a class or a function that rebuilds data is of, or "" if it is not known as one."""
    label = _FRAMEWORKS.get(module.split(".")[0], "")
    *path, last = name.split(".")
    full = f"{module}.{name}"
    if not label or any(not one[:1].isupper() for one in path):
        return ""
    if full.startswith("scipy.sparse.") and last.endswith(("_matrix", "_array")):
        return label
    if full.startswith(_REBUILDERS) or last.startswith("__pyx_unpickle"):
        return label
    lower = last.lower()
    active = any(word in lower for word in _ACTIVE) and not any(word in lower for word in _LOADERS)
    return label if last.lstrip("_")[:1].isupper() and not active else ""
