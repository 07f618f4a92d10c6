"""The fourth-generation tensor core: ``wgmma`` (PTX ISA, Asynchronous Warpgroup Level MMA)."""
