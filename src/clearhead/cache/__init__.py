"""What a sequence keeps between steps, and where.

table = clearhead.cache.pages.PagePool(num_pages=64, page_size=16).start(prompt_ids)
"""
