"""Upload of a finished result to the Hugging Face Hub: asked for before a merge, done after it.

`huggingface_hub` (1.0 or later) does the talking. It is imported when it is used, since that takes time.
"""

from lazymerge.hub.access import check_access
from lazymerge.hub.connection import Target
from lazymerge.hub.upload import upload

__all__ = ["Target", "check_access", "upload"]
