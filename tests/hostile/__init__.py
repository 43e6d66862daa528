"""The directory is hostile: whatever is done to it, nothing wrong loads.

`spoil` has the means, `corpus` the register of cases, made by `byte_cases`, `header_cases`,
`manifest_cases`, `directory_cases` and `meaning_cases`; `goods` makes the directories they start from.
"""
