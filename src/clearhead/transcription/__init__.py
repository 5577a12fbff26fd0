"""Speech to text: from the features of a recording to the tokens of its text, with times.

recording = Recording(features, network, speech); segments = recording.transcribe(Choices(language="de"))

recording   windows of 30 seconds one after another, and the language of the first
decoding    the tokens of one window, the most likely one at each step or by beam search
rules       which tokens may come next: suppressed ones, and the order of timestamps
segments    tokens with timestamps as segments, and where the next window begins
"""

from clearhead.transcription.recording import Choices, Recording, Task
from clearhead.transcription.rules import TokenRules
from clearhead.transcription.segments import TokenSegment, split_segments

__all__ = ["Choices", "Recording", "Task", "TokenRules", "TokenSegment", "split_segments"]
