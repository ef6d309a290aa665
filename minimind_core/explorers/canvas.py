"""A matplotlib canvas that is quick to draw again: texts are kept as stamps, and the PNG writer is a short one.

Laying out and drawing one text takes matplotlib about a millisecond, and an explorer has up to a hundred. Most of them
are the same from one picture to the next, so each is drawn once on a scratch surface and then laid over the picture.
"""

import math
import struct
import zlib

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.font_manager import fontManager, get_font

KEPT = 2000  # stamps; a hundred pixels by twenty need 24 kB


class StampRenderer(RendererAgg):
    """Agg, but a text drawn before (same words, font, color and angle) is copied. Texts start at whole pixels."""

    def __init__(self, width: int, height: int, dpi: float):
        super().__init__(width, height, dpi)
        self._stamps, self._heights = {}, {}

    def _get_font_height_metrics(self, prop):
        """(ascent, descent, line gap) of a font in pixels, by its OS/2 table; Text looks here first, for every text."""
        key = hash(prop)
        if key not in self._heights:
            font = get_font(fontManager.findfont(prop))
            table, scale = font.get_sfnt_table("OS/2"), prop.get_size_in_points() * self.dpi / 72 / font.units_per_EM
            self._heights[key] = (None, None, None)  # let Text measure letters
            if table is not None:
                below = -table["sTypoDescender"] * scale
                self._heights[key] = table["sTypoAscender"] * scale, below, table["sTypoLineGap"] * scale
        return self._heights[key]

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        if gc.get_clip_rectangle() is not None or gc.get_clip_path()[0] is not None:
            return super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
        key = (s, hash(prop), angle, ismath, gc.get_rgb(), gc.get_alpha())
        if key not in self._stamps:
            if len(self._stamps) >= KEPT:
                self._stamps.clear()
            self._stamps[key] = self._stamp(gc, s, prop, angle, ismath, mtext)
        left, top, color, clear = self._stamps[key]
        left, top = left + round(x), top + round(y)
        height, width = clear.shape[:2]
        rows = slice(max(top, 0), min(top + height, int(self.height)))
        columns = slice(max(left, 0), min(left + width, int(self.width)))
        if rows.start < rows.stop and columns.start < columns.stop:
            part = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
            ground = np.asarray(self.buffer_rgba())[rows, columns]
            ground[:] = (ground * clear[part] + color[part] + 127) // 255

    def _stamp(self, gc, s, prop, angle, ismath, mtext) -> tuple[int, int, np.ndarray, np.ndarray]:
        """Offset of the stamp from the text's origin, its color times its alpha, and 255 minus its alpha."""
        width, height, _ = self.get_text_width_height_descent(s, prop, ismath)
        reach = math.ceil(math.hypot(width, height)) + 8
        scratch = RendererAgg(2 * reach, 2 * reach, self.dpi)
        scratch.draw_text(gc, reach, reach, s, prop, angle, ismath, mtext)
        pixels = np.asarray(scratch.buffer_rgba())
        rows, columns = (np.flatnonzero(pixels[..., 3].any(axis=axis)) for axis in (1, 0))
        if not len(rows):
            return 0, 0, np.zeros((0, 0, 4), np.uint32), np.zeros((0, 0, 1), np.uint32)
        pixels = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.uint32)
        alpha = pixels[..., 3:].copy()
        pixels[..., 3] = 255  # alpha itself is laid over like a color
        return columns[0] - reach, rows[0] - reach, pixels * alpha, 255 - alpha


class Canvas(FigureCanvasAgg):
    """A canvas with a StampRenderer."""

    _size = None

    def get_renderer(self) -> StampRenderer:
        size = (*self.get_width_height(physical=True), self.figure.dpi)
        if size != self._size:
            self.renderer, self._size = StampRenderer(*size), size
        return self.renderer

    def png(self) -> bytes:
        """The picture as PNG. No row filter: half the time of Pillow's writer, and no larger for plots."""
        pixels = np.asarray(self.buffer_rgba())
        height, width, _ = pixels.shape
        rows = np.zeros((height, 1 + 4 * width), np.uint8)  # each row starts with the number of its filter, 0
        rows[:, 1:] = pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)  # 8 bits, red green blue alpha
        parts = {b"IHDR": header, b"IDAT": zlib.compress(rows, 1), b"IEND": b""}
        chunks = [
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in parts.items()
        ]
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
