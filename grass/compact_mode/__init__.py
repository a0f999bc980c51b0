"""Compact mode: linear layers that train a few rows of their weight, as an ordinary parameter.

=========================  ===========================================  =============================================
what                       does                                         with
=========================  ===========================================  =============================================
``CompactLayer``           is a converted layer, as                     ``ActiveRows``: where its rows are in the
                           ``CompactLinear`` or ``CompactConv1D``       weight; ``ExploredViews`` of them;
                                                                        ``_Layers``: all there are; ``_Derived``:
                                                                        subclasses of linear layers; ``_Wanted``: what
                                                                        it is converted with
``SketchedRows``           gathers a sketch of its gradient, for rules
                           that read norms
``SyncedRows``             keeps weight and active rows in agreement    ``Listener``, ``LastChange``: who hears of it
``CompactLinearFunction``  computes the gradients of active rows
``ExpertRows``             converts a weight of experts                 ``_ExpertFunction``
``WeightStorage``          reads and writes its weight                  ``Int8Storage``: in 8 bits
``DividedLayer``           is a part of a weight that ranks divide      ``TensorParallelLinear``, ``_Share``,
                                                                        ``ExpertParallelRows``; ``StratumLayer``: how
                                                                        its state is saved
``Attachment``             trains layers by any ``torch.optim``         ``Trained``: a layer in the cycle of refreshes;
                           optimizer                                    ``Owner``: who trains it; ``Reads`` of its
                                                                        weight by others; ``StepRates``: its
                                                                        ``scale``; ``_Usual``: a rate without it;
                                                                        ``RowState``: what it remembers of rows
=========================  ===========================================  =============================================

The folder is not called ``compact`` because ``grass.compact`` is a function.
"""
