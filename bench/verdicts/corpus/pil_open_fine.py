# SPDX-License-Identifier: Apache-2.0
"""Pictures opened with Pillow, loaded and closed."""
# /// truth
# leaks = false
# needs = ["PIL"]
# ///
import io

from PIL import Image

from watched import steps

file = io.BytesIO()
Image.effect_noise((256, 256), 50).convert("RGB").save(file, "PNG")
for step in steps():
    with Image.open(io.BytesIO(file.getvalue())) as picture:
        picture.load()
