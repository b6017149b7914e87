"""The seam into transformers. Importing it registers the attention implementation ``kvslim``."""

from kvslim.attending.handle_attention import register

register()
