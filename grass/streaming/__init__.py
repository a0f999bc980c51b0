"""Models larger than the device. Units of the model, called blocks here, visit it one after another.

===================  ================================================  ==============================================
what                 does                                              with
===================  ================================================  ==============================================
``Stream``           is what ``grass.stream`` returns: counts, undoing
``HostBlock``        has a block's tensors on the host                 ``Place`` of a tensor, its ``Version``, and the
                                                                       ``Change`` that is to be copied
``DeviceBlock``      has them on the device                            ``Counts`` of what was copied
``Prefetcher``       decides which blocks are on the device            ``Order`` of the blocks, each ``Use`` of one
``BlockForward``     computes with a block's tensors on the device     ``StreamedBlock``: the class of such modules
``HostGradients``    brings gradients back during backward             ``_Arrive``
``HostActivations``  keeps a block's inputs until backward             ``HostActivation``
``MicroBatches``     takes all micro-batches through one block before
                     the next comes
===================  ================================================  ==============================================
"""
