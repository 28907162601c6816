"""The codes of findings: how severe each kind is, what it means and what to do about it.

Those of `view.problems` are codes of findings as well. `FINDING_CODES` has the codes that only findings have;
docs/reference/findings.md lists them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ..errors import PROBLEM_CODES

Severity: TypeAlias = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # the worst first


class Kind(NamedTuple):
    """A kind of finding: its severity unless the finding says otherwise, its meaning, and what to do about it."""

    severity: Severity
    meaning: str
    todo: str


# Code -> the kind of finding that only `verify` and `scan` report.
FINDING_CODES: dict[str, Kind] = {
    # -- files
    "wrong-checksum": Kind(
        "error", "Bytes do not have the checksum that their writer recorded.", "Copy the file again from its source."
    ),
    "no-checksum": Kind(
        "note", "The writer recorded no checksums, so damage can stay unnoticed.", "Keep a manifest: lazyckpt digest."
    ),
    "overlapping-data": Kind(
        "error", "Two tensors of a file share some of their bytes, without being tied.", "Write the file again."
    ),
    "identical-files": Kind(
        "error",
        "Files of two ranks have the same contents, although they hold different elements.",
        "Find out whose contents these are, and copy the file of the other rank again.",
    ),
    "absent-chunks": Kind(
        "warning",
        "Some chunks of an array have no file: they read as the fill value.",
        "Check that they were written: writers leave out chunks that have the fill value only.",
    ),
    "stale-file": Kind(
        "warning", "A file was written at another time than the others.", "Check that all files are of one save."
    ),
    # -- values
    "not-a-number": Kind("error", "A tensor has NaN.", "Go back to a checkpoint from before they appeared."),
    "infinite-values": Kind("error", "A tensor has infinities.", "Go back to a checkpoint from before they appeared."),
    "all-zero": Kind("warning", "All elements of a tensor are zero.", "Check that the tensor was initialized."),
    "constant-values": Kind(
        "note", "All elements of a tensor are the same.", "Nothing to do, if training has just begun."
    ),
    "denormal-values": Kind(
        "warning",
        "All elements of a tensor are denormal: too small for full precision.",
        "Check the scale of the tensor.",
    ),
    "saturated-values": Kind(
        "warning",
        "Elements have the largest value of the dtype: they may have been cut off.",
        "Compare with fp32 weights.",
    ),
    "dead-rows": Kind("note", "Some rows or experts of a tensor are zero.", "Check that they are padding, or unused."),
    "outlying-values": Kind(
        "warning",
        "A few elements are far larger than all others of their tensor.",
        "Compare them with the checkpoint before, or with another copy of the file.",
    ),
    # -- agreement
    "rounding-mismatch": Kind(
        "error",
        "The weights are not the fp32 weights of the optimizer, rounded.",
        "Find out which of the two was changed after the save.",
    ),
    "wrong-moment": Kind(
        "error",
        "A state of the optimizer has another shape than its parameter, or values that it cannot have.",
        "Do not continue training with this optimizer state.",
    ),
    "zero-moments": Kind(
        "warning",
        "The optimizer's moments of a parameter are all zero although steps were made.",
        "Check that the parameter was trained.",
    ),
    "differing-steps": Kind(
        "warning", "Parameters or ranks record different steps.", "Find out which save each file is from."
    ),
    "config-mismatch": Kind(
        "warning", "Shapes or names contradict the model's configuration.", "Check that both are of the same model."
    ),
    "unexplained-name": Kind(
        "note",
        "A tensor's name is none that the model of the configuration has.",
        "Check that it belongs to this model: loaders ignore it.",
    ),
    "padded-vocabulary": Kind(
        "note", "The embedding has more rows than the vocabulary.", "Nothing to do: writers pad it."
    ),
    "tokenizer-mismatch": Kind(
        "warning", "The tokenizer has tokens that the embedding has no row for.", "Use the tokenizer of this model."
    ),
    "digest-mismatch": Kind(
        "error", "A tensor is not the one that the manifest describes.", "Copy the checkpoint again, or the manifest."
    ),
    # -- safety
    "dangerous-pickle": Kind(
        "error",
        "Unpickling the file the usual way runs a function that can do harm.",
        "Do not load the file with other programs, and ask where it comes from.",
    ),
    "unknown-global": Kind(
        "warning",
        "A pickle names a class or function that is not known to be harmless.",
        "Load the file with other programs only if you trust its source.",
    ),
    "framework-class": Kind(
        "note", "Pickles name classes of a known package.", "Nothing to do, if you use the package."
    ),
    "pickle-bomb": Kind(
        "error", "A pickle is made to exhaust memory or time.", "Do not load the file with other programs."
    ),
    "unusual-pickle": Kind(
        "warning",
        "A pickle or an archive is not as writers make it, or its name does not say what it is.",
        "Ask where the file comes from.",
    ),
    "shipped-code": Kind(
        "warning", "Code lies beside the weights, which loaders may run.", "Read the code before you load the model."
    ),
    "outside-link": Kind("warning", "A link leads out of the folder.", "Replace it by the file, or remove it."),
    "not-examined": Kind(
        "note", "A file or a tensor could not be examined.", "Unpack it, or examine it with another tool."
    ),
}
_ADVICE = {
    "missing-file": "Copy it from the source, or read only the tensors that are complete.",
    "unreadable-file": "Copy it again and compare checksums.",
    "left-over-file": "Decide which save you want, then remove the files of the other.",
    "unread-program": "Nothing to do: the tensors are in the view.",
    "ignored-file": "Nothing to do, unless you need what is in it.",
    "misnamed-file": "Rename it: other programs rely on the name.",
    "oversized-file": "Clone tensors before torch.save, or convert the checkpoint.",
    "unsafe-pickle": "Do not load the file with other programs. Convert it with lazyckpt, if you trust its numbers.",
    "unpinned-file": "Do not replace files that are open.",
    "part-of-checkpoint": "Open the folder.",
    "unfinished-save": "Use an earlier checkpoint, or copy it again.",
    "other-checkpoint": "Pass tag=, or open the other by its own path.",
    "skipped-checkpoint": "Pass steps= to open_run where it has no step; open it alone to see why it cannot be read.",
    "step-mismatch": "Find out which step each file is from before you continue training.",
    "missing-index": "Check that all files are there.",
    "index-mismatch": "Copy the index again, or write the checkpoint again.",
    "inconsistent-metadata": "Compare names and shapes with the model.",
    "missing-metadata": "Compare names and shapes with the model.",
    "unreadable-object": "Copy the file again, if you need the object.",
    "missing-elements": "Look for the file of the lost rank.",
    "missing-tensor": "Look for the file of the lost rank.",
    "missing-weights": "Look for their files; view.states has what is there.",
    "missing-optimizer": "Look for their files, if you want to continue training.",
    "mismatched-shards": "Check that all files are of one save; view.stored has each shard.",
    "differing-replicas": "Compare the copies in view.stored.",
    "unmerged-tensor": "Pass rules=.",
    "assumed-layout": "Check it against the code that trained the model; pass rules= if it is wrong.",
    "assumed-tie": "Check it against the model.",
    "assumed-stage": "Leave it out with select where it does not belong.",
    "undecided-name": "List the names of the state, which may decide it. Otherwise use the numbers.",
    "undecided-layout": "Save with a format that names parameters, or cut the buffer yourself.",
    "unnumbered-layer": "Look for the files of earlier pipeline stages.",
    "flat-parameter": 'Pass rules={"...": {"flat": {...}}}.',
    "duplicate-tensor": "Nothing to do if they are equal: view.stored has the others.",
    "changed-tensor": "Read it with run.at(step).",
    "replaced-tensor": "Nothing to do: what is read is right.",
    "unsupported-tensor": "Convert it where it was made.",
    "nested-tensor": "Read these.",
    "unsorted-tensor": "Read them from view.stored, if you need them.",
    "undecided-quantization": "Pass the model's config.json as config= to dequantize.",
    "contradicting-quantization": "Find out which is right; pass a corrected config= to dequantize.",
    "assumed-quantization": "Pass the model's config.json as config= to dequantize.",
    "left-out-scale": "Nothing to do; they are in view.stored.",
    "not-quantized": "Nothing to do, or choose another form.",
    "undecided-update": "Pass the option that the message names.",
    "assumed-update": "Pass lr=, gradients= or weight_decay= if you know them.",
    "unused-rule": "Compare its pattern with the names in the view.",
    "not-renamed": "Give rename a table of your own.",
    "unlike-values": "Do not load them into such a model.",
    "noted-at-export": "Look at the checkpoint that was exported.",
    "reader-note": "Ask its authors. Such readers may also have codes of their own.",
}
_ERRORS = {
    "missing-file", "unreadable-file", "unfinished-save", "step-mismatch", "index-mismatch", "missing-elements",
    "missing-tensor", "missing-weights", "mismatched-shards",
}  # fmt: skip


_NOTES = {
    "unread-program", "ignored-file", "misnamed-file", "unpinned-file", "part-of-checkpoint", "other-checkpoint",
    "missing-optimizer", "assumed-tie", "assumed-stage", "replaced-tensor", "nested-tensor", "unused-rule",
    "unsorted-tensor", "not-renamed", "noted-at-export", "reader-note", "flat-parameter", "left-out-scale",
    "not-quantized", "assumed-update",
}  # fmt: skip


def kind_of(code: str) -> Kind:
    """Return the kind of a code: of `FINDING_CODES`, of `errors.PROBLEM_CODES`, or of a reader of another package."""
    if code in FINDING_CODES:
        return FINDING_CODES[code]
    severity: Severity = "error" if code in _ERRORS else "note" if code in _NOTES else "warning"
    return Kind(severity, PROBLEM_CODES.get(code, ""), _ADVICE.get(code, ""))
