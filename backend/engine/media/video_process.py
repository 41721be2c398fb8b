"""The program that extracts frames from one video, run as a child process; see `video`.

Standard input is the video as a regular file; the first argument is a JSON object with the limits.
The program writes one line of JSON, with `refusal` or what `_extracted` has found, followed by the
frames (8-bit RGB, row by row). If the video exceeds a limit, the process ends: by SIGXCPU (time),
or with the exit code TOO_LARGE (memory); see `common.bounded_process`.

FFmpeg (through PyAV) may use only the containers and codecs in this module, and cannot open files:
it reads standard input through this process.
"""

from __future__ import annotations

import json
import math
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from backend.engine.media.items import BadItem
from backend.engine.media.limits import VIDEO_MEMORY, MediaLimits, shape_problem
from common.bounded_process import limit_own_process

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from PIL.Image import Image

_DEMUXERS = {
    "MP4": "mov",
    "QuickTime": "mov",
    "WebM or Matroska": "matroska",
    "AVI": "avi",
    "GIF": "gif",
}
FORMATS = tuple(_DEMUXERS)
_CODECS = ("h264", "hevc", "vp8", "vp9", "mpeg4", "mpeg2video", "h263", "mjpeg", "gif")
BROKEN = "cannot be decoded: its data is broken"
# Minimum share of the frames that the header states. With fewer, the video counts as truncated.
_WHOLE = 0.9


def main() -> None:
    import PIL.Image  # noqa: F401 # before the limit, which is for the video's memory alone

    task = json.loads(sys.argv[1])
    limits = MediaLimits(**task["limits"])
    limit_own_process(task["cpu_seconds"], VIDEO_MEMORY)
    write_answer(lambda: _extracted(task["kind"], limits, task["most"]))


def write_answer(decode: Callable[[], tuple[dict[str, Any], Iterable[bytes]]]) -> None:
    """Decode, and write a line of JSON, then bytes; or a line with the refusal."""
    import av

    try:
        head, rest = decode()
    except BadItem as refusal:
        head, rest = {"refusal": str(refusal)}, ()
    except (av.FFmpegError, MemoryError):
        head, rest = {"refusal": BROKEN}, ()
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    for part in rest:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def opened(
    medium: Literal["audio", "video"], demuxer: str, codecs: Sequence[str], usual: str
) -> tuple[InputContainer, Any]:
    """Open the file on standard input, and its main stream of a medium. Raises BadItem.

    usual: codecs that the client may use instead of another.
    """
    import av

    allowed = {
        "protocol_whitelist": "",  # files that this file names are not opened
        "format_whitelist": demuxer,
        "codec_whitelist": ",".join(codecs),
    }
    try:
        file = av.open(
            sys.stdin.buffer,
            "r",
            demuxer,
            container_options=allowed,
            metadata_errors="replace",  # titles are not always UTF-8
        )
        stream: Any = file.streams.best(medium)
    except av.FFmpegError:
        raise BadItem("cannot be decoded: it is broken or cut off; send an intact file") from None
    if stream is None and len(file.streams):
        raise BadItem(f"cannot be decoded: it has no {medium}")
    if stream is None:
        raise BadItem("cannot be decoded: it is broken or cut off; send an intact file")
    codec = stream.codec_context
    if codec is None or codec.name not in codecs:
        name = f"the codec {codec.codec.canonical_name}" if codec else "an unknown codec"
        raise BadItem(f"has {name}, which this backend does not decode: send {usual}")
    codec.thread_count = 1
    return file, stream


def _extracted(kind: str, limits: MediaLimits, most: int) -> tuple[dict[str, Any], Iterator[bytes]]:
    """Return evenly spaced frames, including the first and the last. Raises BadItem.

    kind: one of `FORMATS`.
    most: maximum number of pixels of all frames together, which are scaled down if they have more.

    The first result has the size of the frames, the index of each in the video, the number of
    frames in the video, its frames per second, and the processor time of decoding in seconds.
    """
    video, stream = _opened(kind, limits.image_pixels)
    packets = _packets(video, stream)
    times = sorted(packet.pts for packet in packets if not packet.is_discard)
    count, seconds = len(times), float((times[-1] - times[0]) * stream.time_base) if times else 0.0
    rate = (count - 1) / seconds if seconds > 0 else float(stream.guessed_rate or 1)
    stated = float(stream.duration * stream.time_base) if stream.duration else 0.0
    stated = stated or (video.duration or 0) / 1e6  # the file states microseconds
    if max(stated, seconds) > limits.video_seconds:
        raise BadItem(
            f"lasts longer than {limits.video_seconds} seconds: send a part of it, or load the"
            " model with a larger max_video_seconds"
        )
    _require_whole(count, stream.frames or round(stated * rate))
    indices = _even(count, limits.video_frames)
    share = most / len(indices)
    frames = [_image(frame, share) for frame in _at(stream, packets, [times[at] for at in indices])]
    if len(frames) < len(indices):
        # Some packets have no visible frame, or a damaged frame, so the frames are counted.
        intact = sum(1 for _ in _decoded(stream, packets))
        _require_whole(intact, count)
        count, indices = intact, _even(intact, limits.video_frames)
        chosen, shown = set(indices), enumerate(_decoded(stream, packets))
        frames = [_image(frame, share) for at, frame in shown if at in chosen]
    width, height = frames[0].size
    if any(frame.size != (width, height) for frame in frames):
        raise BadItem("has frames of different sizes: encode it with one frame size")
    found = {"size": (width, height), "indices": indices, "count": count, "rate": rate}
    return found | {"cost": time.process_time()}, (frame.tobytes() for frame in frames)


def _opened(kind: str, most_pixels: int) -> tuple[InputContainer, Any]:
    """Open the video on standard input, and its main stream. Raises BadItem."""
    usual = "H.264, HEVC, VP8, VP9 or MPEG-4"
    video, stream = opened("video", _DEMUXERS[kind], _CODECS, usual)
    codec = stream.codec_context
    if problem := shape_problem(codec.width, codec.height):
        raise BadItem(problem)
    if codec.width * codec.height > most_pixels:
        raise BadItem(
            f"is {codec.width} x {codec.height} pixels, but a frame may have {most_pixels} in all:"
            " send it smaller, or load the model with a larger max_image_pixels"
        )
    return video, stream


def _even(count: int, most: int) -> list[int]:
    """Return the indices of at most `most` evenly spaced frames among `count` frames."""
    chosen = min(count, most)
    return [round(at * (count - 1) / max(chosen - 1, 1)) for at in range(chosen)]


def _require_whole(found: int, count: int) -> None:
    if not found:
        raise BadItem(BROKEN)
    if found < _WHOLE * count:
        raise BadItem(f"is truncated: it has {found} of {count} frames; send the complete file")


def _packets(video: InputContainer, stream: Any) -> list[Any]:
    """Return the stream's readable packets, in the order of decoding."""
    import av

    packets: list[Any] = []
    with suppress(av.FFmpegError):
        for packet in video.demux(stream):
            packet.pts = packet.dts if packet.pts is None else packet.pts
            if packet.pts is not None:
                packets.append(packet)
    return packets


def _decoded(stream: Any, packets: Sequence[Any]) -> Iterator[VideoFrame]:
    """Yield the undamaged frames of packets, in the order in which they are shown."""
    import av

    stream.codec_context.flush_buffers()
    for packet in chain(packets, [None]):  # None makes the decoder return its last frames
        with suppress(av.FFmpegError):
            yield from stream.decode(packet)


def _at(stream: Any, packets: Sequence[Any], times: Sequence[int]) -> Iterator[VideoFrame]:
    """Yield the frames at these ascending times, and stop if a frame is not found.

    Decoding starts at the last key frame before each frame.
    """
    keys = [(-math.inf, 0)]
    keys += sorted((packet.pts, at) for at, packet in enumerate(packets) if packet.is_keyframe)
    frames, last = _decoded(stream, packets), -math.inf
    for wanted in times:
        key, start = keys[bisect(keys, (wanted, len(packets))) - 1]
        if key > last:
            frames, last = _decoded(stream, packets[start:]), -math.inf
        for frame in frames:
            if frame.pts is None or frame.pts < last:
                return  # the packets lack the times of frames, as those of H.264 in AVI
            last = frame.pts
            if last >= wanted:
                break
        if last != wanted:
            return
        yield frame


def _image(frame: Any, most_pixels: float) -> Image:
    """Return a frame as an image: rotated, and scaled down to at most `most_pixels`."""
    from PIL.Image import Resampling, Transpose

    image: Image = frame.to_image(interpolation="BICUBIC", threads=1)
    scale = math.sqrt(most_pixels / (image.width * image.height))
    if scale < 1:
        size = max(int(image.width * scale), 1), max(int(image.height * scale), 1)
        image = image.resize(size, Resampling.BOX)
    turns = round(frame.rotation / 90) % 4
    return image.transpose(Transpose[f"ROTATE_{90 * turns}"]) if turns else image


if __name__ == "__main__":
    main()
