# SPDX-License-Identifier: Apache-2.0
"""What a run's checkpoint holds, where its first weights come from, and how it resumes.

Next: jaxmoe/checkpoint/store.py writes and reads the files.
"""
