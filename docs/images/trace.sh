#!/bin/sh
# Make trace.png, the picture of a trace page. Needs Chromium, and Pillow to reduce the picture to 200 colors:
#     sh docs/images/trace.sh
set -eu
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
clearhead trace smollm2 "The baker lit the oven, weighed the flour and sang a song that she had learned." \
    --out "$folder/page.html"
chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1180 --screenshot="$folder/page.png" \
    "file://$folder/page.html"
python -c "
from PIL import Image
Image.open('$folder/page.png').convert('RGB').quantize(200).save('trace.png', optimize=True)"
