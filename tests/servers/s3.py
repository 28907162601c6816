"""Objects behind S3's protocol, that of Google Cloud Storage (its XML form) and plain HTTP, from memory and a folder.

It knows what clients that read and write checkpoints use: GET with ranges and conditions, HEAD, PUT, copies, DELETE of
one and many, ListObjectsV2, multipart uploads, versions. It checks no signature. tests/test_servers.py compares it with
moto.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .faults import error
from .http import FilePart, Piece, Request, Response, cut
from .server import Handle, Server, main, running

PART = 5 << 20  # the least size of all parts but the last one
PAGE = 1000  # names in an answer to a listing


@dataclass
class Object:
    """One version of an object."""

    body: Sequence[Piece]
    etag: str
    modified: float
    version: str
    deleted: bool = False
    metadata: dict[str, str] = field(default_factory=dict)  # headers

    @property
    def size(self) -> int:
        return sum(map(len, self.body))


@dataclass
class Upload:
    """A multipart upload that is not complete."""

    key: str
    parts: dict[int, Object] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Bucket:
    """Objects by name; each has its versions, the newest last. What memory does not have is looked up in ``folder``,
    which is never written to."""

    folder: str | None = None
    versioned: bool = False
    objects: dict[str, list[Object]] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)

    def find(self, key: str) -> Object | None:
        """The current version of an object."""
        if versions := self.objects.get(key):
            return None if versions[-1].deleted else versions[-1]
        return self._file(key)

    def _file(self, key: str) -> Object | None:
        if self.folder is None or not key or any(part in ("", ".", "..") for part in key.split("/")):
            return None
        path = os.path.join(self.folder, key)
        try:
            info = os.stat(path)
        except (OSError, ValueError):
            return None
        if not os.path.isfile(path):
            return None
        tag = f"{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}"
        body = [FilePart(path, 0, info.st_size)] if info.st_size else []
        return Object(body, hashlib.md5(tag.encode()).hexdigest(), info.st_mtime, "null")

    def list(self, prefix: str, delimiter: str) -> list[tuple[str, bool]]:
        """The names below a prefix, in the order of their bytes, and the common prefixes (True) to the delimiter."""
        found: set[tuple[str, bool]] = set()
        for key in itertools.chain(self.objects, self._names(prefix, delimiter)):
            if not key.startswith(prefix):
                continue
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            if at >= 0:
                group = key[: at + len(delimiter)]
                if (group, True) not in found and (key not in self.objects or self.find(key)):
                    found.add((group, True))
            elif key not in self.objects or self.find(key):
                found.add((key, False))
        return sorted(found, key=lambda entry: entry[0].encode())

    def _names(self, prefix: str, delimiter: str) -> Iterator[str]:
        """Names of files below a prefix; with the delimiter "/", one of each folder is enough."""
        if self.folder is None:
            return
        start = prefix.rpartition("/")[0]
        if ".." in start.split("/"):
            return
        if delimiter == "/":
            try:
                entries = list(os.scandir(os.path.join(self.folder, start)))
            except OSError:
                return
            before = f"{start}/" if start else ""
            for entry in entries:
                if entry.is_dir():
                    inside = next(_files(entry.path), None)
                    if inside is not None:
                        yield f"{before}{entry.name}/{inside}"
                else:
                    yield before + entry.name
        else:
            for name in _files(os.path.join(self.folder, start)):
                yield f"{start}/{name}" if start else name


def _files(folder: str) -> Iterator[str]:
    for top, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(top, name), folder)


class Store:
    """The application: buckets, and what is asked of them."""

    def __init__(self, buckets: dict[str, Bucket], part: int = PART, pages: bool = False) -> None:
        self.buckets, self.part, self.pages = buckets, part, pages
        self.numbers = itertools.count(1)

    async def __call__(self, request: Request) -> Response:
        name, _, key = request.path[1:].partition("/")
        if not name:
            return self._buckets()
        if not key and request.method == "PUT" and not request.query:
            self.buckets.setdefault(name, Bucket())
            return Response(200, {"Location": f"/{name}"})
        bucket = self.buckets.get(name)
        if bucket is None:
            return error(request, 404, "NoSuchBucket", "The specified bucket does not exist")
        if key:
            return self._object(bucket, key, request)
        return self._bucket(name, bucket, request)

    # -- buckets

    def _buckets(self) -> Response:
        names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in self.buckets)
        return xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>")

    def _bucket(self, name: str, bucket: Bucket, request: Request) -> Response:
        asked = request.query
        match request.method:
            case "HEAD":
                return Response(200)
            case "DELETE":
                if bucket.list("", ""):
                    return error(request, 409, "BucketNotEmpty")
                del self.buckets[name]
                return Response(204)
            case "PUT" if "versioning" in asked:
                bucket.versioned = b"Enabled" in request.body
                return Response(200)
            case "GET" if "versioning" in asked:
                status = "<Status>Enabled</Status>" if bucket.versioned else ""
                return xml("VersioningConfiguration", status)
            case "GET" if "location" in asked:
                return xml("LocationConstraint", "")
            case "GET" if "versions" in asked:
                return self._versions(name, bucket, asked.get("prefix", ""))
            case "GET" if "uploads" in asked:
                uploads = "".join(
                    f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId></Upload>"
                    for number, upload in bucket.uploads.items()
                    if upload.key.startswith(asked.get("prefix", ""))
                )
                return xml("ListMultipartUploadsResult", f"<Bucket>{name}</Bucket>{uploads}")
            case "POST" if "delete" in asked:
                return self._delete_many(bucket, request)
            case "GET":
                return self._list(name, bucket, request)
        return error(request, 405, "MethodNotAllowed")

    def _list(self, name: str, bucket: Bucket, request: Request) -> Response:
        asked = request.query
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        size = min(int(asked.get("max-keys") or PAGE), PAGE)
        names = bucket.list(prefix, delimiter)
        after = unquote(asked.get("continuation-token", "")) or asked.get("start-after", "") or asked.get("marker", "")
        first = bisect_right(names, after.encode(), key=lambda entry: entry[0].encode()) if after else 0
        page = names[first : first + size]
        more = first + size < len(names)
        coded = quote if asked.get("encoding-type") == "url" else escape
        parts = [f"<Name>{name}</Name><Prefix>{coded(prefix)}</Prefix><MaxKeys>{size}</MaxKeys>"]
        parts.append(f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>")
        if delimiter:
            parts.append(f"<Delimiter>{coded(delimiter)}</Delimiter>")
        if asked.get("encoding-type") == "url":
            parts.append("<EncodingType>url</EncodingType>")
        if more:
            parts.append(f"<NextContinuationToken>{quote(page[-1][0], safe='')}</NextContinuationToken>")
        for key, is_group in page:
            if is_group:
                parts.append(f"<CommonPrefixes><Prefix>{coded(key)}</Prefix></CommonPrefixes>")
            elif found := bucket.find(key):
                parts.append(f"<Contents><Key>{coded(key)}</Key>{_described(found)}</Contents>")
        return xml("ListBucketResult", "".join(parts))

    def _versions(self, name: str, bucket: Bucket, prefix: str) -> Response:
        parts = [f"<Name>{name}</Name><IsTruncated>false</IsTruncated>"]
        for key in sorted(bucket.objects):
            versions = bucket.objects[key] if key.startswith(prefix) else []
            for found in reversed(versions):
                tag = "DeleteMarker" if found.deleted else "Version"
                latest = str(found is versions[-1]).lower()
                parts.append(
                    f"<{tag}><Key>{escape(key)}</Key><VersionId>{found.version}</VersionId>"
                    f"<IsLatest>{latest}</IsLatest>{_described(found)}</{tag}>"
                )
        return xml("ListVersionsResult", "".join(parts))

    def _delete_many(self, bucket: Bucket, request: Request) -> Response:
        parts = []
        for entry in elements(request.body, "Object"):
            key = entry["Key"]
            self._delete(bucket, key, entry.get("VersionId"))
            parts.append(f"<Deleted><Key>{escape(key)}</Key></Deleted>")
        return xml("DeleteResult", "".join(parts))

    # -- objects

    def _object(self, bucket: Bucket, key: str, request: Request) -> Response:
        asked, method = request.query, request.method
        if method in ("POST", "PUT", "DELETE", "GET") and ("uploadId" in asked or "uploads" in asked):
            return self._upload(bucket, key, request)
        match method:
            case "GET" | "HEAD":
                return self._get(bucket, key, request)
            case "PUT":
                return self._put(bucket, key, request)
            case "DELETE":
                self._delete(bucket, key, asked.get("versionId") or asked.get("generation"))
                return Response(204)
        return error(request, 405, "MethodNotAllowed")

    def _get(self, bucket: Bucket, key: str, request: Request) -> Response:
        asked = request.query.get("versionId") or request.query.get("generation")
        found = bucket.find(key)
        if asked and not (found and found.version == asked):
            found = next((o for o in bucket.objects.get(key, ()) if o.version == asked and not o.deleted), None)
            if found is None:
                return error(request, 404, "NoSuchVersion", "The specified version does not exist.")
        if found is None and self.pages and (entries := bucket.list(f"{key.rstrip('/')}/", "/")):
            return _page(key, [name for name, _ in entries])
        if found is None:
            return error(request, 404, "NoSuchKey", "The specified key does not exist.")
        if failed := _unmet(found, request):
            return failed
        headers = _headers(bucket, found) | {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        try:
            wanted = request.range(found.size)
        except ValueError:
            failed = error(request, 416, "InvalidRange", "The requested range is not satisfiable")
            failed.headers["Content-Range"] = f"bytes */{found.size}"
            return failed
        if wanted is None:
            return Response(200, headers, found.body)
        headers["Content-Range"] = f"bytes {wanted[0]}-{wanted[1] - 1}/{found.size}"
        return Response(206, headers, cut(found.body, *wanted))

    def _put(self, bucket: Bucket, key: str, request: Request) -> Response:
        if failed := self._unmet_put(bucket, key, request):
            return failed
        source = request.headers.get("x-amz-copy-source") or request.headers.get("x-goog-copy-source")
        if source is None:
            made = self._made([request.body] if request.body else [])
            self._keep(bucket, key, made)
            return Response(200, _headers(bucket, made))
        name, _, path = unquote(source.partition("?")[0]).lstrip("/").partition("/")
        copied = self.buckets[name].find(path) if name in self.buckets else None
        if copied is None:
            return error(request, 404, "NoSuchKey", "The specified key does not exist.")
        made = self._made(copied.body)
        self._keep(bucket, key, made)
        return xml("CopyObjectResult", _described(made))

    def _unmet_put(self, bucket: Bucket, key: str, request: Request) -> Response | None:
        held, headers = bucket.find(key), request.headers
        wanted = headers.get("if-match")
        if (held and (headers.get("if-none-match") == "*" or headers.get("x-goog-if-generation-match") == "0")) or (
            wanted is not None and (held is None or f'"{held.etag}"' != wanted)
        ):
            return error(request, 412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
        return None

    def _made(self, body: Sequence[Piece]) -> Object:
        """Return a new version. Its tag depends on the number of the version, not on the bytes: hashing takes long."""
        number = next(self.numbers)
        return Object(body, hashlib.md5(f"{number}".encode()).hexdigest(), time.time(), str(10**12 + number))

    def _keep(self, bucket: Bucket, key: str, made: Object) -> None:
        versions = bucket.objects.setdefault(key, [])
        if not bucket.versioned:
            versions.clear()
        versions.append(made)

    def _delete(self, bucket: Bucket, key: str, version: str | None) -> None:
        if version is not None:
            bucket.objects[key] = [o for o in bucket.objects.get(key, ()) if o.version != version]
        elif bucket.find(key) is not None:
            marker = self._made([])
            marker.deleted = True
            if bucket.versioned or bucket.folder is not None:
                self._keep(bucket, key, marker)
            else:
                bucket.objects.pop(key, None)
        if not bucket.objects.get(key):
            bucket.objects.pop(key, None)

    # -- uploads in parts

    def _upload(self, bucket: Bucket, key: str, request: Request) -> Response:
        asked = request.query
        if "uploads" in asked:
            number = f"upload-{next(self.numbers)}"
            metadata = {name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")}
            bucket.uploads[number] = Upload(key, metadata=metadata)
            body = f"<Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            return xml("InitiateMultipartUploadResult", body)
        number = asked["uploadId"]
        upload = bucket.uploads.get(number)
        if upload is None or upload.key != key:
            return error(request, 404, "NoSuchUpload", "The specified upload does not exist.")
        match request.method:
            case "PUT":
                part = self._made([request.body])
                upload.parts[int(asked["partNumber"])] = part
                return Response(200, {"ETag": f'"{part.etag}"'})
            case "GET":
                parts = "".join(
                    f"<Part><PartNumber>{n}</PartNumber>{_described(p)}</Part>" for n, p in sorted(upload.parts.items())
                )
                return xml("ListPartsResult", f"<Key>{escape(key)}</Key><IsTruncated>false</IsTruncated>{parts}")
            case "DELETE":
                del bucket.uploads[number]
                return Response(204)
        return self._complete(bucket, number, upload, request)

    def _complete(self, bucket: Bucket, number: str, upload: Upload, request: Request) -> Response:
        named = [(int(part["PartNumber"]), part["ETag"].strip('"')) for part in elements(request.body, "Part")]
        parts = [upload.parts.get(n) for n, _ in named]
        if not named or any(p is None or p.etag != tag for p, (_, tag) in zip(parts, named)):
            return error(request, 400, "InvalidPart", "One or more of the specified parts could not be found.")
        if named != sorted(named):
            return error(request, 400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        found = [p for p in parts if p is not None]
        if any(p.size < self.part for p in found[:-1]):
            return error(
                request, 400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size"
            )
        if failed := self._unmet_put(bucket, upload.key, request):
            return failed
        made = self._made([piece for p in found for piece in p.body])
        made.etag += f"-{len(found)}"
        made.metadata = upload.metadata
        self._keep(bucket, upload.key, made)
        del bucket.uploads[number]
        response = xml("CompleteMultipartUploadResult", f'<Key>{escape(upload.key)}</Key><ETag>"{made.etag}"</ETag>')
        response.headers |= _headers(bucket, made)
        return response

    # -- for faults

    def replace(self, path: str) -> None:
        """Give an object other bytes of the same size, as another writer would."""
        name, _, key = path[1:].partition("/")
        bucket = self.buckets[name]
        found = bucket.find(key)
        if found is not None:
            turned = bytes(255 - b for b in b"".join(_bytes(found.body)))
            self._keep(bucket, key, self._made([turned]))


def _bytes(body: Iterable[Piece]) -> Iterator[bytes]:
    for piece in body:
        yield piece.read() if isinstance(piece, FilePart) else bytes(piece)


def _headers(bucket: Bucket, found: Object) -> dict[str, str]:
    headers = {"ETag": f'"{found.etag}"', "Last-Modified": formatdate(found.modified, usegmt=True), **found.metadata}
    if bucket.versioned:
        headers |= {"x-amz-version-id": found.version, "x-goog-generation": found.version}
    return headers


def _described(found: Object) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
    return (
        f"<LastModified>{when}</LastModified><ETag>&quot;{found.etag}&quot;</ETag><Size>{found.size}</Size>"
        "<StorageClass>STANDARD</StorageClass>"
    )


def _page(folder: str, names: Iterable[str]) -> Response:
    """The page that nginx shows for a folder, without names that begin with a dot."""
    inside = [name[len(folder.rstrip("/")) + 1 :] for name in names]
    inside = [name for name in inside if not name.startswith(".")]
    lines = "".join(f'<a href="{quote(name)}">{escape(name)}</a>\n' for name in inside)
    page = f"<html><head><title>Index of /{escape(folder)}</title></head><body><pre>{lines}</pre></body></html>"
    return Response(200, {"Content-Type": "text/html"}, [page.encode()])


def _unmet(found: Object, request: Request) -> Response | None:
    headers, tag = request.headers, f'"{found.etag}"'
    wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
    if wanted is not None and wanted != "*" and tag not in re.split(r",\s*", wanted):
        return error(request, 412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
    if unwanted is not None and (unwanted == "*" or tag in re.split(r",\s*", unwanted)):
        return Response(304, {"ETag": tag})
    return None


def xml(name: str, content: str) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'
    return Response(200, {"Content-Type": "application/xml"}, [text.encode()])


def elements(body: bytes | bytearray, name: str) -> list[dict[str, str]]:
    """The children of each element of this name, with their texts."""
    tree = ElementTree.fromstring(bytes(body))
    found = (element for element in tree.iter() if _plain(element.tag) == name)
    return [{_plain(child.tag): child.text or "" for child in element} for element in found]


def _plain(tag: str) -> str:
    return tag.rpartition("}")[2]


@contextmanager
def serve_s3(
    folder: str | os.PathLike[str] | None = None, delay: float = 0.02, bucket: str = "bucket", part: int = PART,
    versioned: bool = False, pages: bool = False,
) -> Iterator[Handle]:  # fmt: skip
    """Serve a bucket from another process; yield what controls it.

    Parameters
    ----------
    folder
        Files that are objects of the bucket by their names in it. They are never written to: what is put or deleted
        is in memory. None for an empty bucket.
    delay
        Seconds before each answer.
    bucket
        The name of the bucket; others are made by ``PUT /name``.
    part
        The least size of a part of an upload, except for the last one.
    versioned
        Whether to keep all versions of objects, and to send their ids.
    pages
        Whether a folder is a page of links, as web servers show it.
    """
    told = {"bucket": bucket, "delay": delay, "part": part, "versioned": versioned, "pages": pages}
    told["folder"] = None if folder is None else str(Path(folder).resolve())
    with running("s3", told) as port:
        yield Handle(port)


def _main(told: dict[str, Any]) -> None:
    store = Store({told["bucket"]: Bucket(told["folder"], told["versioned"])}, told["part"], told["pages"])
    server = Server(store, told["delay"])
    server.faults.replace = store.replace
    main(server)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
